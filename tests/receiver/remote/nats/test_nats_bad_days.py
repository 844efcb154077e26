"""NATS servers that lose their store, ask for certificates, or die with the collectors: the stored messages."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates import Authority
from collecting import Emitter, all_stored, forwarder, wait_for
from nats_collecting import NatsCollectorProcess, read_together
from nats_server import NatsServerProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServerProcess]:
    with NatsServerProcess(tmp_path) as started:
        yield started


@pytest.mark.slow
def test_a_server_that_lost_its_store_is_noticed_and_gets_what_spools_hold(
    server: NatsServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with NatsCollectorProcess(tmp_path, server.url) as collector:
        with forwarder(server.url, tmp_path / "spool", drain_sec=60) as sending:
            emitter = Emitter(sending)
            emitter.losses(100)
            assert sending.drain(60)
            wait_for(lambda: len(read_together(collector.log)) == 100, "the first messages")
            collector.kill()
            emitter.losses(100)
            assert sending.drain(60)  # only JetStream has them
            server.kill()
            shutil.rmtree(tmp_path / "jetstream")
            server.start()
            emitter.losses(100)
            wait_for(lambda: "has lost messages that it had acknowledged" in caplog.text, "a line about it")
            collector.start()
            wait_for(lambda: len(read_together(collector.log)) >= 300, "all messages")
        server.kill()
        shutil.rmtree(tmp_path / "jetstream")
        server.start()
        wait_for(
            lambda: any("has lost messages" in line for line in collector.errors), "the collector's line"
        )
        assert collector.stop() == 0
    assert sorted(seq for seqs in all_stored(collector.log).values() for seq in seqs) == list(range(300))


@pytest.mark.slow
def test_a_server_with_tls_checks_and_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    cert, key = ours.sign("server")
    mine, my_key = ours.sign("client", "client")
    wrong, wrong_key = others.sign("client", "client")
    ca = ours.certificate
    tls = ("--tls", "--tlscert", str(cert), "--tlskey", str(key), "--tlsverify", "--tlscacert", str(ca))
    with NatsServerProcess(tmp_path, *tls) as server:
        address = f"tls://localhost:{server.port}"
        good = {"tls_ca": ca, "tls_cert": mine, "tls_key": my_key}
        for name, options in {
            "no certificate": {"tls_ca": ca},
            "another authority's certificate": {"tls_ca": ca, "tls_cert": wrong, "tls_key": wrong_key},
            "a server of another authority": {**good, "tls_ca": others.certificate},
        }.items():
            caplog.clear()
            with forwarder(address, tmp_path / name, drain_sec=0.0, **options) as recorder:
                Emitter(recorder).losses(10)
                wait_for(lambda: "cannot be forwarded at present" in caplog.text, f"a line about {name}")
            assert recorder.unsent_bytes, name
        with forwarder(address, tmp_path / "good", drain_sec=60.0, **good) as recorder:
            Emitter(recorder).losses(10)
        assert not recorder.unsent_bytes


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_after_random_kills_the_collectors_logs_have_each_message_once(
    server: NatsServerProcess, tmp_path: Path, seed: int
) -> None:
    chance, pause = random.Random(seed), threading.Event()
    with (
        NatsCollectorProcess(tmp_path / "a", server.url) as first,
        NatsCollectorProcess(tmp_path / "b", server.url) as second,
        forwarder(server.url, tmp_path / "spool", drain_sec=120) as sending,
    ):
        emitter = Emitter(sending)

        def emit() -> None:
            for _ in range(100):
                emitter.losses(100)
                sending.flush()
                pause.wait(0.02)

        thread = threading.Thread(target=emit)
        thread.start()
        for _ in range(6):
            victim = chance.choice([server, first, second])
            print(f"killed is {'the server' if victim is server else victim.log.parent.name}")
            victim.kill()
            pause.wait(chance.uniform(0.0, 0.5))
            victim.start()
            pause.wait(chance.uniform(0.0, 0.5))
        thread.join()
        sending.close()
        assert not sending.unsent_bytes
        wait_for(lambda: len(read_together(first.log, second.log)) >= 10_000, "all messages", 200)
        assert first.stop() == 0
        assert second.stop() == 0
    assert read_together(first.log, second.log) == list(range(10_000))
