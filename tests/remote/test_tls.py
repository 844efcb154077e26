"""Who may reach a collector: this machine only, or by TLS; certificates that are wrong or expired reach nobody."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from certificates import Authority
from collecting import CollectorProcess, Emitter, forwarder, only, stored, wait_for

from receiver.cli import main

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def emit(address: str, spool: Path, **options: object) -> int:
    """Emits ten messages; how many bytes of them did not arrive."""
    with forwarder(address, spool, **options) as recorder:
        Emitter(recorder).losses(10)
    return recorder.unsent_bytes


def test_both_sides_check_each_others_certificates(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    cert, key = ours.sign("collector")
    mine, my_key = ours.sign("client", "client")
    wrong, wrong_key = others.sign("client", "client")
    ca = ours.certificate
    arguments = ["--quiet", "--tls-cert", cert, "--tls-key", key, "--tls-ca", ca]
    with CollectorProcess(tmp_path, *map(str, arguments)) as collector:
        good = {"tls_ca": ca, "tls_cert": mine, "tls_key": my_key}
        refused = {
            "no TLS": {},
            "no certificate": {"tls_ca": ca},
            "another authority's certificate": {"tls_ca": ca, "tls_cert": wrong, "tls_key": wrong_key},
            "a collector of another authority": {**good, "tls_ca": others.certificate},
        }
        for name, options in refused.items():
            assert emit(collector.address, tmp_path / name, drain_sec=1.0, **options), name
        assert not emit(collector.address, tmp_path / "good", drain_sec=60.0, **good)
        collector.stop()
    assert only(stored(collector.log)[0]) == list(range(10))


def test_an_expired_certificate_and_another_hosts_are_no_good(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    for name, host, days in (("expired", "localhost", -1), ("elsewhere", "collector.example", 2)):
        cert, key = ours.sign(name, host, days=days)
        with CollectorProcess(
            tmp_path / name, "--quiet", "--tls-cert", str(cert), "--tls-key", str(key)
        ) as collector:
            unsent = emit(
                collector.address, tmp_path / f"spool {name}", drain_sec=1.0, tls_ca=ours.certificate
            )
            assert unsent, name
            assert not list((tmp_path / name / "collected").glob("*/*"))


def test_beyond_this_machine_only_with_tls_or_when_it_is_said_to_be_insecure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for host in ("0.0.0.0", "[::]", "192.168.1.1", "collector.example"):
        assert main(["collect", "--listen", f"{host}:0", "--log", str(tmp_path / "log")]) == 1
        assert "--insecure" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


def test_token_files_that_others_read_and_halves_of_pairs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    tokens.chmod(0o644)
    for arguments, said in (
        (["--token-file", str(tokens)], "chmod 600"),
        (["--tls-cert", "a.pem"], "belong together"),
        (["--tls-ca", "a.pem"], "--tls-cert"),
        (["--consumers", str(tokens)], "--consumers"),
    ):
        assert main(["collect", "--listen", "localhost:0", "--log", str(tmp_path / "log"), *arguments]) == 1
        assert said in capsys.readouterr().err


def test_two_collectors_do_not_share_a_folder(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        with pytest.raises(AssertionError, match="another collector"):
            CollectorProcess(tmp_path, "--quiet")
        assert wait_for(lambda: collector.process.poll() is None, "the first one")
