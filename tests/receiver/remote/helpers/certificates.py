"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

_CONFIGURATION = """
[ca]
default_ca = authority
[authority]
database = index
new_certs_dir = .
certificate = ca.pem
private_key = ca.key
default_md = sha256
rand_serial = yes
unique_subject = no
policy = any
[any]
commonName = supplied
"""

# Python 3.13 verifies strictly (ssl.VERIFY_X509_STRICT).
_EXTENSIONS = """
subjectAltName = DNS:{host}
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


class Authority:
    """Signs certificates; its own is `ca.pem` in its folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._run(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "ca.key",
            "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    def sign(
        self, name: str, host: str = "localhost", *, first_day: int = -1, last_day: int = 2
    ) -> tuple[Path, Path]:
        """A certificate for a host, and its key; good from and to these days, counted from today."""
        (self.folder / f"{name}.ext").write_text(_EXTENSIONS.format(host=host))
        (self.folder / "ca.cnf").write_text(_CONFIGURATION)
        (self.folder / "index").touch()
        self._run(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key",
            "-out", f"{name}.csr", "-subj", f"/CN={host}",
        )  # fmt: skip
        self._run(
            "ca", "-batch", "-notext", "-config", "ca.cnf", "-in", f"{name}.csr", "-out", f"{name}.pem",
            "-startdate", _time(first_day), "-enddate", _time(last_day), "-extfile", f"{name}.ext",
        )  # fmt: skip
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=60)


def _time(day: int) -> str:
    return (datetime.now(UTC) + timedelta(days=day)).strftime("%Y%m%d%H%M%SZ")
