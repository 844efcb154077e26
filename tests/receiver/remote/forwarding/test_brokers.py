"""Brokers: an address chooses one by its scheme, and a registered one forwards and collects like the built-in ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import folder_broker
from checkout import ROOT
from collecting import LOSS, WAIT_SEC, CollectorProcess, Emitter, forwarder, only, stored, wait_for
from hostcallback.receiver.cli import main
from hostcallback.receiver.remote.brokers import BROKERS, DIRECT, broker_of, expected
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.text import without_password
from python_process import python_output


class FolderCollectorProcess(CollectorProcess):
    """`hcb collect --folder`, with the broker of `folder_broker`."""

    program = (str(Path(folder_broker.__file__)),)

    def __init__(self, folder: Path, url: str, *arguments: str) -> None:
        self.url = url
        super().__init__(folder, *arguments)

    def command(self) -> list[str]:
        return ["--folder", self.url, "--log", str(self.log)]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """An address of the folder broker, which is registered during the block."""
    BROKERS.append(folder_broker.FOLDER)
    yield f"file://{tmp_path}/shared"
    BROKERS.remove(folder_broker.FOLDER)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("localhost:7070", "listen"),
        ("nats://localhost:4222", "nats"),
        ("tls://one:4222,nats://two:4222", "nats"),
        ("dns:///collector:7070", "listen"),
    ],
)
def test_the_scheme_of_an_address_chooses_the_broker(address: str, name: str) -> None:
    assert broker_of(address).name == name
    assert Forward(address).broker.name == name


def test_a_broker_is_known_once_it_is_registered(url: str) -> None:
    assert Forward(url).broker is folder_broker.FOLDER
    assert expected() == (
        "the collector's host:port, such as 'localhost:7070', or a NATS server, 'nats://localhost:4222', "
        "or a shared folder, 'file:///mnt/share'"
    )


def test_a_broker_is_imported_only_when_it_is_used() -> None:
    code = (
        "import sys\n"
        "from hostcallback.receiver.remote.options import Forward\n"
        "from hostcallback.receiver.cli.parser import make_parser\n"
        "make_parser('collect').format_help()\n"
        "assert Forward('nats://localhost:4222').broker.title == 'NATS server'\n"
        "unwanted = ('nats', 'grpc', 'hostcallback.receiver.remote.nats')\n"
        "assert not [name for name in sys.modules if name.startswith(unwanted)]\n"
    )
    python_output("-c", code, cwd=ROOT, timeout_sec=60)


def test_passwords_are_left_out_of_messages() -> None:
    assert without_password("nats://me:secret@one:1,tls://two:2") == "nats://one:1,tls://two:2"
    assert DIRECT.schemes == ()


@pytest.mark.slow
def test_messages_arrive_once_and_in_order_also_after_the_collector_was_killed(
    url: str, tmp_path: Path
) -> None:
    with FolderCollectorProcess(tmp_path, url, "--print-all") as collector:
        with forwarder(url, tmp_path / "spool") as sending:
            emitter = Emitter(sending)
            for k in range(100):
                emitter.emit(LOSS, np.float32(k), np.int32(k))
            assert sending.drain(WAIT_SEC)
            collector.kill()
            emitter.losses(100)
            assert not sending.drain(0.5)
            collector.start()
            assert sending.drain(WAIT_SEC)
        wait_for(lambda: len(collector.lines) >= 200, "printing of all")
        assert collector.stop() == 0
        assert any(line.startswith(f"hcb: collecting from {url} into ") for line in collector.errors)
    numbers, lost = stored(collector.log)
    assert only(numbers) == [*range(200)]
    assert lost == []
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_command_that_needs_a_collector_reports_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--via", url]) != 0
    assert "is a shared folder, and this needs a collector to which processes forward directly" in (
        capsys.readouterr().err
    )


def test_collect_names_every_way_and_reports_a_bad_url(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", "--log", str(tmp_path / "log")]) == 2
    ways = "give --listen HOST:PORT, or --nats URL, or --folder URL, or several of them"
    assert capsys.readouterr().err == f"hcb: collect: {ways}\n"
