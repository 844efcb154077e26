"""No text of a log, a flight file or a stream reaches the terminal, or the log of a program, as it is."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import jax
import pytest

import hostcallback as hcb
from hostcallback.receiver.cli import main
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery.delivery import Delivery
from hostcallback.receiver.remote.forwarding_protocol import StreamKey
from hostcallback.receiver.text import foreign, printable, printable_lines, printable_report
from hostile_log import FORGED, HOSTILE, UNSAFE, write_hostile_flight, write_hostile_log


def check(text: str) -> None:
    """Fails for text that a terminal would obey, or with a line that a sender made."""
    assert not UNSAFE & set(text), sorted(UNSAFE & set(text))
    assert not [line for line in text.split("\n") if line.startswith(FORGED)]


Command = Callable[[Path, Path], list[str | Path]]
COMMANDS: dict[str, Command] = {
    "cat": lambda log, flight: ["cat", log],
    "cat --full": lambda log, flight: ["cat", "--full", log],
    "cat --json": lambda log, flight: ["cat", "--json", log],
    "cat --shards": lambda log, flight: ["cat", "--shards", log],
    "cat with a name": lambda log, flight: ["cat", log, "--name", HOSTILE.replace("\0", "")],
    "tail": lambda log, flight: ["tail", log],
    "stats": lambda log, flight: ["stats", log],
    "stats --json": lambda log, flight: ["stats", "--json", log],
    "errors": lambda log, flight: ["errors", log],
    "errors --json": lambda log, flight: ["errors", "--json", log],
    "diff": lambda log, flight: ["diff", log, log.with_name("other")],
    "diff --all": lambda log, flight: ["diff", "--all", log, log.with_name("other")],
    "recover": lambda log, flight: ["recover", flight],
    "missing": lambda log, flight: ["cat", log.with_name(f"none{HOSTILE}".replace("\0", ""))],
    "convert": lambda log, flight: ["convert", log, "--to", "jsonl", log.with_name("out.jsonl")],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_hostile_log(tmp_path / "log")
    write_hostile_log(tmp_path / "other", value=2.5)
    flight = write_hostile_flight(tmp_path / "flight")
    try:
        main([str(word) for word in COMMANDS[name](log, flight)])
    except SystemExit as error:
        assert error.code == 2, "only wrong arguments may end it"
    shown = capsys.readouterr()
    check(shown.out)
    check(shown.err)
    assert shown.out or shown.err or name == "convert"


def test_replay_prints_no_controls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_hostile_log(tmp_path / "log")
    main(["replay", str(log)])
    shown = capsys.readouterr()
    # What printed in the program prints again, lines included; the terminal obeys none of it.
    assert not UNSAFE & set(shown.out)
    check(shown.err)


@pytest.mark.parametrize("everything", [False, True])
def test_the_collector(
    everything: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = write_hostile_log(tmp_path / "log")
    store = Store(tmp_path / "stored")
    key = StreamKey("run", 0, "0" * 16)
    folder = store.folder(key.run)
    folder.mkdir()
    (segment,) = log.iterdir()
    segment.rename(folder / key.segment_name(1))
    delivery = Delivery(store, everything=everything)
    assert delivery.wait_idle(30)
    for failed in delivery.failed_checks():
        check(printable_report(failed.report()))
    delivery.close()
    store.close()
    check(capsys.readouterr().out)
    check(caplog.text)
    assert caplog.records


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a gRPC server that refuses each call with a hostile status text."""

    def refuse(request: object, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, HOSTILE)

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.stream_stream_rpc_method_handler(refuse)

    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(10)


def test_what_a_collector_says_as_it_refuses_a_program(
    refusing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.warns(hcb.ForwardingWarning) as warned,
        hcb.outfeed_receiver(forward=refusing, spool=tmp_path / "spool"),
    ):
        jax.jit(lambda x: hcb.id_print(x, output_stream=io.StringIO()))(1.0)
    (text,) = (str(warning.message) for warning in warned)
    assert "PERMISSION_DENIED" in text
    assert "owned" in text
    check(text)
    check(caplog.text)


@pytest.mark.parametrize("words", [["tail", "--from"], ["ctl", "--via"], ["top", "--once", "--via"]])
def test_what_a_collector_says_as_it_refuses_a_command(
    words: list[str], refusing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, refusing, *(["--enable", "loss"] if words[0] == "ctl" else [])]) == 1
    shown = capsys.readouterr()
    assert "owned" in shown.err
    check(shown.out + shown.err)


def test_what_an_opentelemetry_collector_says(refusing: str, caplog: pytest.LogCaptureFixture) -> None:
    sink = hcb.otlp(f"http://{refusing}", drain_sec=5.0)
    with hcb.outfeed_receiver(sinks=[sink]):
        jax.jit(lambda x: hcb.id_print(x, output_stream=io.StringIO()))(1.0)
    sink.close()
    assert "owned" in caplog.text
    check(caplog.text)


def test_a_foreign_text_is_short_and_one_line() -> None:
    assert foreign(None) == ""
    check(foreign(HOSTILE * 1000))
    assert foreign("a\nb") == r"a\nb"
    assert len(foreign("x" * 10_000)) == 2000


def test_printable_text_stays_as_it_is() -> None:
    text = "loss = 0.5 ± 1e-3, Größe 3 x 4, 損失"
    assert printable(text) == printable_lines(text) == text
    assert printable_lines("[[1 2]\n [3 4]]\tx", "  ") == "[[1 2]\n   [3 4]]\tx"
    assert printable("\ud800") == "\\ud800"
