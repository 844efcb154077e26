"""`hcb tail --from` a collector: the last messages, and new ones, of all processes."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from checkout import ROOT, python_path
from collecting import CollectorProcess, Emitter, forwarder, wait_for
from hostcallback.receiver.remote import forwarding_protocol
from python_process import run_python, start_python


class Tail:
    """`hcb tail --from`, and the messages it has shown."""

    def __init__(self, address: str, *arguments: str, **environment: str) -> None:
        command = ["-u", "-m", "hostcallback.receiver.cli", "tail", "--json", "--from", address, *arguments]
        options = {"PYTHONPATH": python_path(), **environment}
        self.process = start_python(*command, stderr=subprocess.PIPE, **options)
        self.found: list[Any] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.found.append(json.loads(line))

    def seqs(self, process: str) -> list[int]:
        return [item["seq"] for item in self.found if item["process"] == process]

    def end(self) -> str:
        """Waits until it ends; returns its standard error."""
        self.process.wait(60)
        self._thread.join(60)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout, self.process.stderr:
            return self.process.stderr.read()


@pytest.mark.slow
def test_the_last_and_later_messages_of_all_processes(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        with forwarder(collector.address, tmp_path / "a", process_index=0, spool_bytes=1 << 17) as first:
            emitter = Emitter(first)
            for _ in range(20):  # several segments
                emitter.losses(100)
                first.flush()
            assert first.drain(60)
            tail = Tail(collector.address, "-n", "5")
            wait_for(lambda: len(tail.found) == 5, "the last messages")
            emitter.losses(10)
            with forwarder(collector.address, tmp_path / "b", process_index=1) as second:
                Emitter(second).losses(20)
                wait_for(lambda: len(tail.found) >= 35, "those that came")
            emitter.losses(2_000)
            wait_for(lambda: len(tail.found) >= 2_035, "those of later segments")
        assert tail.seqs("process 0") == list(range(1_995, 4_010))
        assert tail.seqs("process 1") == list(range(20))
        collector.stop()
    assert tail.end() == f"hcb: the collector at {collector.address} has ended\n"
    assert not [line for line in collector.errors if "Traceback" in line]
    assert tail.process.returncode == 1


@pytest.mark.slow
def test_a_follower_sees_only_the_runs_its_token_permits(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("writer\nreader mine*\n")
    tokens.chmod(0o600)
    with CollectorProcess(tmp_path, "--quiet", "--token-file", str(tokens)) as collector:
        for run in ("mine-1", "other", "mine-2"):
            with forwarder(
                collector.address, tmp_path / "spool", run=run, token="writer", drain_sec=60
            ) as recorder:
                Emitter(recorder).losses(3)
        tail = Tail(collector.address, "-n", "100", HOSTCALLBACK_TOKEN="reader")
        wait_for(lambda: len(tail.found) >= 6, "two runs")
        stranger = Tail(collector.address, HOSTCALLBACK_TOKEN="stranger")
        assert "UNAUTHENTICATED" in stranger.end()
        assert not stranger.found
        collector.stop()
        tail.end()
    assert len(tail.found) == 6


def test_a_newer_version_of_the_protocol_is_refused(tmp_path: Path) -> None:
    with (
        CollectorProcess(tmp_path, "--quiet") as collector,
        grpc.insecure_channel(collector.address) as channel,
    ):
        follow = channel.unary_stream(f"/{forwarding_protocol.SERVICE}/{forwarding_protocol.FOLLOW}")
        with pytest.raises(
            grpc.RpcError, match=r"speaks version 2 of the protocol, this collector 1: update"
        ) as refused:
            next(follow(forwarding_protocol.encode_map(version=2, run="*")))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        collector.stop()


@pytest.mark.slow
def test_there_must_be_something_to_read(tmp_path: Path) -> None:
    for arguments in ([], ["log", "--from", "localhost:1"], ["--from", "nowhere"]):
        command = ["-m", "hostcallback.receiver.cli", "tail", *arguments]
        ended = run_python(*command, cwd=tmp_path, timeout_sec=60, PYTHONPATH=str(ROOT))
        assert ended.returncode == 1
        assert ended.stderr.startswith("hcb: ")
