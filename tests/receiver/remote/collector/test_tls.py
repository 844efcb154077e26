"""Access to a collector: from this machine only, or by TLS; clients with wrong or expired certificates are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from certificates import Authority
from collecting import CollectorProcess, Emitter, forwarder, only, stored, wait_for
from hostcallback.receiver.cli import main
from steady_client import SteadyClient

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def said(address: str, spool: Path, caplog: pytest.LogCaptureFixture, **options: object) -> str:
    """Log message of a client whose messages do not arrive."""
    caplog.clear()
    with forwarder(address, spool, drain_sec=0.0, **options) as recorder:
        Emitter(recorder).losses(10)
        text: str = wait_for(
            lambda: next((record.getMessage() for record in caplog.records), ""), "a line about it"
        )
    assert recorder.unsent_bytes
    assert not recorder.refused  # certificates are renewed: the client tries again
    return text


def test_both_sides_check_each_others_certificates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    cert, key = ours.sign("collector")
    ca = ours.certificate
    arguments = ["--quiet", "--tls-cert", cert, "--tls-key", key, "--tls-ca", ca]

    def shown(name: str, authority: Authority = ours, **days: int) -> dict[str, Path]:
        mine, my_key = authority.sign(name, "client", **days)
        return {"tls_ca": ca, "tls_cert": mine, "tls_key": my_key}

    good = shown("good")
    hung_up, hung_up_tls = "it may require TLS (give tls_ca)", "does it require a client certificate"
    refused = {
        "no TLS": ({}, hung_up, "WRONG_VERSION_NUMBER"),
        "no certificate": ({"tls_ca": ca}, hung_up_tls, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        "another authority's": (shown("other", others), hung_up_tls, "unable to get local issuer"),
        "expired": (shown("old", first_day=-3, last_day=-1), hung_up_tls, "certificate has expired"),
        "not yet valid": (shown("new", first_day=1), hung_up_tls, "certificate is not yet valid"),
        "a collector of another authority": (
            {**good, "tls_ca": others.certificate}, "the certificate of the server at", "",
        ),
    }  # fmt: skip
    with CollectorProcess(tmp_path, *map(str, arguments)) as collector:
        with SteadyClient(collector.address, tmp_path / "spool", **good) as steady:
            for name, (options, here, there) in refused.items():
                assert here in said(collector.address, tmp_path / name, caplog, **options), name
                wait_for(
                    lambda there=there: there in "".join(collector.errors), f"the collector's line: {name}"
                )
        collector.stop()
    assert only(stored(collector.log, "steady")[0]) == list(range(steady.sent))
    assert not (collector.log / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "days", "why"),
    [
        ("localhost", {"first_day": -3, "last_day": -1}, "certificate has expired"),
        ("localhost", {"first_day": 1}, "certificate is not yet valid"),
        ("collector.example", {}, "Hostname Verification Check failed"),
    ],
)
def test_a_collector_with_a_wrong_certificate_gets_no_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, days: dict[str, int], why: str
) -> None:
    ours = Authority(tmp_path / "ours")
    cert, key = map(str, ours.sign("collector", host, **days))
    with CollectorProcess(tmp_path, "--quiet", "--tls-cert", cert, "--tls-key", key) as collector:
        text = said(collector.address, tmp_path / "spool", caplog, tls_ca=ours.certificate)
        assert why in text
        assert "signed by a certificate in tls_ca, and issued for the host in the address" in text
        collector.stop()
    assert not list(collector.log.glob("*/*"))


def test_beyond_this_machine_only_with_tls_or_insecure(
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


@pytest.mark.slow
def test_two_collectors_do_not_share_a_folder(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        with pytest.raises(AssertionError, match="another collector"):
            CollectorProcess(tmp_path, "--quiet")
        assert wait_for(lambda: collector.process.poll() is None, "the first one")
