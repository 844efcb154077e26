"""Forwarding through a real nats-server: the stored messages, per collector, after each kind of kill."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest

from checkout import REMOTE_HELPERS, python_path
from collecting import LOSS, WAIT_SEC, Emitter, forwarder, only, stored, wait_for
from hostcallback.receiver.remote.nats.publication import Publication
from nats_collecting import NatsCollectorProcess, all_messages
from nats_server import NatsServerProcess
from threads import run_coroutine

NORM = replace(LOSS, name="grad.norm *>", consumer_id=90, tree=["array"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServerProcess]:
    with NatsServerProcess(tmp_path) as started:
        yield started


def published(url: str, subject: str) -> list[Any]:
    """The messages that JetStream has of a subject."""

    async def fetch() -> list[Any]:
        client = await nats.connect(url)
        jetstream = client.jetstream()
        subscription = await jetstream.subscribe(subject, stream="TAPS", ordered_consumer=True)
        found = []
        while True:
            try:
                found.append(await subscription.next_msg(timeout=1))
            except TimeoutError:
                break
        await client.close()
        return found

    return run_coroutine(fetch())


def test_messages_arrive_once_and_in_order_with_their_steps(
    server: NatsServerProcess, tmp_path: Path
) -> None:
    with NatsCollectorProcess(tmp_path, server.url, "--print-all") as collector:
        with forwarder(server.url, tmp_path / "spool", process_index=3) as sending:
            emitter = Emitter(sending)
            for k in range(300):
                emitter.emit(LOSS, np.float32(k), np.int32(k))
                emitter.emit(NORM, np.float32(2 * k))
        assert list((tmp_path / "spool").iterdir()) == []
        wait_for(lambda: len(all_messages(collector.log)) == 600, "all messages in the log")
        assert collector.stop() == 0
    numbers, lost = stored(collector.log)
    assert only(numbers) == list(range(600))
    assert lost == []
    assert any("[p3 d0 step 7 " in line for line in collector.lines)


@pytest.mark.slow
def test_each_tap_has_a_subject(server: NatsServerProcess, tmp_path: Path) -> None:
    with forwarder(server.url, tmp_path / "spool", run="my.run", process_index=2) as sending:
        emitter = Emitter(sending)
        for _ in range(50):
            emitter.emit(LOSS, np.float32(0), np.int32(0))
            emitter.emit(NORM, np.float32(0))
    assert list((tmp_path / "spool").iterdir()) == []
    losses = [Publication.decode(message.data) for message in published(server.url, "taps.my=2Erun.2.loss")]
    assert sum(len(unit.block) for unit in losses) == 50
    assert [seq for unit in losses for seq in unit.block.seqs.tolist()] == list(range(0, 100, 2))
    norms = published(server.url, "taps.*.*.grad=2Enorm=20=2A=3E")
    assert sum(len(Publication.decode(message.data).block) for message in norms) == 50


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_loses_and_doubles_nothing(
    server: NatsServerProcess, tmp_path: Path
) -> None:
    with NatsCollectorProcess(tmp_path, server.url) as collector:
        with forwarder(server.url, tmp_path / "spool", drain_sec=120) as sending:
            emitter = Emitter(sending)
            for _ in range(4):
                have = len(all_messages(collector.log))
                emitter.losses(2_000)
                # In the middle of it.
                wait_for(lambda have=have: len(all_messages(collector.log)) > have, "messages in the log")
                server.kill()
                emitter.losses(500)
                sending.flush()
                assert sending.unsent_bytes > 0
                server.start()
        assert list((tmp_path / "spool").iterdir()) == []
        wait_for(lambda: len(all_messages(collector.log)) >= 10_000, "all messages in the log", 120)
        assert collector.stop() == 0
    assert all_messages(collector.log) == list(range(10_000))


@pytest.mark.slow
def test_a_killed_process_s_spool_is_published_by_the_next_one(
    server: NatsServerProcess, tmp_path: Path
) -> None:
    program = (
        "import sys, os, signal; sys.path.insert(0, sys.argv[3])\n"
        "from pathlib import Path\n"
        "from collecting import Emitter, forwarder\n"
        "sending = forwarder(sys.argv[1], Path(sys.argv[2]))\n"
        "Emitter(sending).losses(500)\n"
        "sending.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    spool = tmp_path / "spool"
    server.kill()
    subprocess.run(
        [sys.executable, "-c", program, server.url, str(spool), str(REMOTE_HELPERS)],
        env={"PYTHONPATH": python_path(), "PATH": "", "HOSTCALLBACK_RUN": "run"}, timeout=WAIT_SEC, check=False,
    )  # fmt: skip
    assert len(list(spool.iterdir())) == 1
    server.start()
    with NatsCollectorProcess(tmp_path, server.url) as collector:
        with forwarder(server.url, spool, drain_sec=60):
            wait_for(lambda: all_messages(collector.log) == list(range(500)), "the dead process's messages")
    assert list(spool.iterdir()) == []


@pytest.mark.slow
def test_collectors_share_the_messages_and_one_takes_over_from_a_killed_one(
    server: NatsServerProcess, tmp_path: Path
) -> None:
    with (
        NatsCollectorProcess(tmp_path / "a", server.url) as first,
        NatsCollectorProcess(tmp_path / "b", server.url) as second,
        forwarder(server.url, tmp_path / "spool", drain_sec=60) as sending,
    ):
        emitter = Emitter(sending)
        pause = threading.Event()
        for _ in range(40):
            emitter.losses(50)
            sending.flush()
            pause.wait(0.05)
        wait_for(lambda: len(all_messages(first.log, second.log)) == 2_000, "all messages")
        assert all_messages(first.log)
        assert all_messages(second.log)
        first.kill()
        emitter.losses(1_000)
        sending.flush()
        wait_for(lambda: set(all_messages(first.log, second.log)) == set(range(3_000)), "the rest", 120)
    assert max(Counter(all_messages(first.log, second.log)).values()) == 1


@pytest.mark.slow
def test_a_collector_that_is_killed_goes_on_where_it_was(server: NatsServerProcess, tmp_path: Path) -> None:
    with NatsCollectorProcess(tmp_path, server.url) as collector:
        with forwarder(server.url, tmp_path / "spool", drain_sec=60) as sending:
            emitter = Emitter(sending)
            for _ in range(3):
                emitter.losses(1_000)
                sending.flush()
                collector.kill()
                collector.start()
        wait_for(lambda: len(all_messages(collector.log)) >= 3_000, "all messages", 120)
        assert collector.stop() == 0
    assert all_messages(collector.log) == list(range(3_000))


@pytest.mark.slow
def test_messages_published_twice_are_stored_once(server: NatsServerProcess, tmp_path: Path) -> None:
    with forwarder(server.url, tmp_path / "spool") as sending:
        Emitter(sending).losses(100)
    messages = published(server.url, "taps.>")

    async def publish_again() -> None:
        client = await nats.connect(server.url)
        for message in messages:  # under other ids, as if JetStream had forgotten these
            await client.jetstream().publish(message.subject, message.data)
        await client.close()

    run_coroutine(publish_again())
    assert len(published(server.url, "taps.>")) == 2 * len(messages)
    with NatsCollectorProcess(tmp_path, server.url) as collector:
        with forwarder(server.url, tmp_path / "spool", process_index=1) as sending:
            Emitter(sending).losses(1)
        wait_for(lambda: len(all_messages(collector.log)) >= 101, "all messages")
        assert collector.stop() == 0
    assert Counter(all_messages(collector.log)) == Counter([0, *range(100)])


@pytest.mark.slow
def test_data_that_is_not_a_message_of_a_tap_is_left_out(server: NatsServerProcess, tmp_path: Path) -> None:
    with NatsCollectorProcess(tmp_path, server.url) as collector:

        async def publish() -> None:
            client = await nats.connect(server.url)
            for data in (b"", b"no msgpack", bytes(1000)):
                await client.jetstream().publish("taps.run.0.loss", data)
            await client.close()

        run_coroutine(publish())
        with forwarder(server.url, tmp_path / "spool") as sending:
            Emitter(sending).losses(10)
        wait_for(lambda: len(all_messages(collector.log)) == 10, "the messages")
        assert collector.stop() == 0
    assert sum("is not a tap's, and was left out" in line for line in collector.errors) == 3


@pytest.mark.slow
def test_a_message_that_the_server_cannot_take_is_noted_as_lost(
    server: NatsServerProcess, tmp_path: Path
) -> None:
    with NatsCollectorProcess(tmp_path, server.url) as collector:
        with forwarder(server.url, tmp_path / "spool") as sending:
            emitter = Emitter(sending)
            emitter.losses(1)
            emitter.emit(NORM, np.zeros(1 << 20, np.float32))
            emitter.emit(NORM, np.zeros(150_000, np.float32))
            emitter.emit(NORM, np.zeros(150_000, np.float32))
        wait_for(lambda: len(all_messages(collector.log)) == 3, "the messages")
        assert collector.stop() == 0
    numbers, lost = stored(collector.log)
    assert only(numbers) == [0, 2, 3]
    assert [(note.first_seq, note.last_seq, note.messages) for note in lost] == [(1, 1, 1)]
    assert "max_payload" in lost[0].reason


def test_a_server_without_jetstream_is_reported_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with NatsServerProcess(tmp_path) as server:
        server.kill()
        server._command.remove("-js")
        at = server._command.index("-sd")
        del server._command[at : at + 2]
        server.start()
        with forwarder(server.url, tmp_path / "spool", drain_sec=0.1) as sending:
            Emitter(sending).losses(1)
            wait_for(lambda: "has no JetStream: start it with -js" in caplog.text, "a warning")
    assert len(list((tmp_path / "spool").iterdir())) == 1


def test_a_server_that_wants_a_token_refuses_those_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with NatsServerProcess(tmp_path, "--auth", "secret") as server:
        with forwarder(server.url, tmp_path / "spool", drain_sec=5, token="wrong") as sending:
            Emitter(sending).losses(1)
            wait_for(lambda: sending.refused, "a refusal")
        with forwarder(server.url, tmp_path / "spool", drain_sec=60, token="secret") as sending:
            Emitter(sending).losses(1)
        assert list((tmp_path / "spool").iterdir()) == []


def test_passwords_in_addresses_are_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = "nats://me:secret@127.0.0.1:1,tls://me:secret@127.0.0.1:2"
    with forwarder(address, tmp_path / "spool", drain_sec=0.1) as sending:
        Emitter(sending).losses(1)
        wait_for(lambda: "cannot be forwarded at present" in caplog.text, "a warning")
    assert sending.options.shown_address == "nats://127.0.0.1:1,tls://127.0.0.1:2"
    assert "secret" not in caplog.text
