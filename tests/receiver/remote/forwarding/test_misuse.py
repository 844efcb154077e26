"""Forwarding to a wrong address, or without a writable spool: the errors, and their cures."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

import hostcallback as hcb
from certificates import Authority
from collecting import CollectorProcess, Emitter, all_stored, forwarder, stored, wait_for
from hostcallback.receiver.cli import main
from hostcallback.receiver.errors import RemoteError, SpoolError
from hostcallback.receiver.remote import forwarding_protocol
from ports import free_port


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """The address of a server that sends this data to every client, and nothing more."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(0.05)
        end = threading.Event()

        def serve() -> None:
            while not end.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                stack.enter_context(connection).sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            end.set()
            thread.join()


@contextmanager
def another_service() -> Iterator[str]:
    """The address of a gRPC server that is not a collector."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        server.stop(0).wait()


def said(address: str, spool: Path, caplog: pytest.LogCaptureFixture, **options: object) -> str:
    """Log message when forwarding does not work; every message stays in the spool."""
    caplog.clear()
    with forwarder(address, spool, drain_sec=0.0, **options) as recorder:
        Emitter(recorder).losses(10)
        text: str = wait_for(lambda: next((r.getMessage() for r in caplog.records), ""), "a line about it")
    assert recorder.unsent_bytes > 10 * 64
    assert len(list(spool.iterdir())) == 1
    assert address in text
    return text


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "not a collector, or one with TLS: correct the address, or give tls_ca",
        ),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "not a collector"),
        pytest.param(b"", "does not answer", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_is_not_a_collector(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes, cure: str
) -> None:
    with answering(data) as address:
        text = said(address, tmp_path / "spool", caplog)
    assert cure in text
    assert "the sender retries" in text


def test_of_a_hosts_addresses_one_refuses_and_one_is_not_a_collector(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # gRPC reports the address that it tried last, which is any of localhost's.
    with answering(b"SSH-2.0-OpenSSH_9.9\r\n") as address:
        text = said(address.replace("127.0.0.1", "localhost"), tmp_path / "spool", caplog)
    assert "is not a collector" in text


def test_no_listener_and_no_such_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = said(f"localhost:{free_port()}", tmp_path / "no listener", caplog)
    assert "no collector is listening" in text
    assert "Start `hcb collect` there" in text
    text = said("no-such-host.invalid:7070", tmp_path / "no host", caplog)
    assert "this machine cannot resolve the host name" in text


def test_another_grpc_service_is_asked_again_every_minute_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with another_service() as address:
        text = said(address, tmp_path / "spool", caplog)
    assert "the program that listens at" in text
    assert "the sender asks again every minute" in text


@pytest.mark.slow
def test_tls_where_there_is_none_and_none_where_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path / "authority")
    cert, key = map(str, authority.sign("collector"))
    with CollectorProcess(tmp_path / "plain", "--quiet") as collector:
        text = said(collector.address, tmp_path / "a", caplog, tls_ca=authority.certificate)
        assert "does not use TLS: leave out tls_ca" in text
    with CollectorProcess(tmp_path / "tls", "--quiet", "--tls-cert", cert, "--tls-key", key) as collector:
        text = said(collector.address, tmp_path / "b", caplog)
        assert "it may require TLS (give tls_ca)" in text


@pytest.mark.slow
def test_a_collector_and_a_process_of_different_protocols(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        monkeypatch.setattr(forwarding_protocol, "VERSION", 7)
        text = said(collector.address, tmp_path / "spool", caplog)
        assert "the client speaks version 7 of the protocol, this collector 1" in text
        assert "update hostcallback where it is older" in text
        assert wait_for(lambda: [line for line in collector.errors if "version 7" in line], "a line about it")
        monkeypatch.undo()
        with forwarder(
            collector.address, tmp_path / "spool", drain_sec=60.0
        ) as recorder:  # its turn comes now
            Emitter(recorder).losses(5)
        collector.stop()
    assert sorted(map(len, stored(collector.log)[0].values())) == [5, 10]


def test_a_spool_that_cannot_be_written_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "spool", Path("/proc/spool")):
        with pytest.raises(
            SpoolError, match=f"the spool is {folder}, and nothing can be written there.*give spool="
        ):
            forwarder("localhost:7070", folder)
        with pytest.raises(SpoolError, match="give spool="):
            with hcb.outfeed_receiver(forward="localhost:7070", spool=folder):
                pass
    with hcb.outfeed_receiver():  # the devices have no other receiver
        pass


def test_files_that_are_not_certificates_are_found_before_any_file_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    cert, key = ours.sign("client")
    _, other_key = others.sign("client")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for options, expected in (
        ({"tls_ca": text}, "text: not certificates of authorities"),
        ({"tls_ca": ours.certificate, "tls_cert": text, "tls_key": key}, "not a certificate and its key"),
        (
            {"tls_ca": ours.certificate, "tls_cert": cert, "tls_key": other_key},
            "not a certificate and its key",
        ),
    ):
        for address in ("localhost:7070", "nats://localhost:4222"):
            with pytest.raises(RemoteError, match=expected):
                forwarder(address, tmp_path / "spool", **options)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pem"):
        forwarder("localhost:7070", tmp_path / "spool", tls_ca="nowhere.pem")
    assert not (tmp_path / "spool").exists()
    log = str(tmp_path / "log")
    arguments = ["collect", "--listen", "localhost:0", "--log", log, "--tls-cert", str(cert), "--tls-key"]
    assert main([*arguments, str(other_key)]) == 1
    assert "not a certificate and its key" in capsys.readouterr().err
    assert main(["collect", "--nats", "nats://localhost:4222", "--log", log, "--nats-ca", str(text)]) == 1
    assert "not certificates of authorities" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_of_one_number_are_distinguished(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--print-all") as collector:
        with (
            forwarder(collector.address, tmp_path / "a", process_index=1, drain_sec=60.0) as first,
            forwarder(collector.address, tmp_path / "b", process_index=1, drain_sec=60.0) as second,
        ):
            Emitter(first).losses(50)
            Emitter(second).losses(60)
        assert collector.stop() == 0
    assert sorted(all_stored(collector.log).values(), key=len) == [list(range(50)), list(range(60))]
    assert sum(line.startswith("[p1 d0 ") for line in collector.lines) == 110
