"""Options of forwarding: the collector's address, the spool and its limits, and access."""

from __future__ import annotations

import enum
import os
import stat
import tempfile
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from hostcallback.receiver import environment, errors, processes
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.remote import brokers, credentials
from hostcallback.receiver.text import representation, without_password


class WhenFull(enum.StrEnum):
    """Policy for messages that find no room in a spool. Each loss is noted where the messages are stored."""

    BLOCK = "block"
    """The messages wait, and their device with them: no message is lost."""
    DROP_OLDEST = "drop_oldest"
    """The oldest segments that the sender has not reached are dropped."""
    DROP_NEWEST = "drop_newest"
    """The messages are dropped."""
    SAMPLE = "sample"
    """In a spool that is more than half full, one message in `sample_every` is kept, and each failed check; in a full
    one, none."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Options of forwarding, for `outfeed_receiver(forward=...)`.

    Attributes:
        address: of the collector, `host:port`; or of a NATS server with JetStream, `nats://host:port` or `tls://`.
        spool: the folder; None for this user's folder in the system's folder for temporary files.
        run: name of the program's run; empty for `$HOSTCALLBACK_RUN`, or a name that no other run has (`run_name`).
        spool_bytes: limit of unacknowledged bytes in the spool.
        when_full: policy for messages beyond the limit.
        sample_every: for `WhenFull.SAMPLE`.
        fsync: whether each write of the spool is synced to the disk.
        window_bytes: limit of sent and unacknowledged bytes.
        drain_sec: seconds for which the end of a receiver waits for the collector.
        tls_ca: file of the certificates that verify the collector's; None for no TLS.
        tls_cert: file of this client's certificate, if the collector requires one.
        tls_key: file of the certificate's key.
        token: the bearer token.
        insecure: whether the token may go to another machine without TLS, where others on the network can read it.
        control: whether clients that the collector permits may control this process's taps through it
            (`hcb ctl --via`).

    Example:
        options = hcb.Forward("collector:7070", spool="spool", run="exp42")  # for outfeed_receiver(sinks=[options])
    """

    address: str
    _: KW_ONLY
    spool: str | os.PathLike[str] | None = None
    run: str = ""
    spool_bytes: int = 1 << 30
    when_full: WhenFull | str = WhenFull.BLOCK
    sample_every: int = 10
    fsync: bool = False
    window_bytes: int = 8 << 20
    drain_sec: float = 10.0
    tls_ca: str | os.PathLike[str] | None = None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    token: str = ""
    insecure: bool = False
    control: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for an option out of range."""
        address = self.address if isinstance(self.address, str) else ""
        is_direct = brokers.broker_of(address) is brokers.DIRECT
        scheme, separator, rest = address.partition("://")
        if separator and is_direct and scheme != "dns":  # gRPC's own: dns:///host:port
            raise ValueError(
                f"forward is {without_password(address)!r}, and a collector's address has no {scheme}://: give "
                f"{without_password(rest)!r}, expected {brokers.expected()}"
            )
        host, _, port = address.rpartition(":")
        if is_direct and (not host or not port.isdecimal() or not 0 < int(port) < 65536):
            shown = without_password(address) if address else self.address
            raise ValueError(f"forward is {shown!r}, expected {brokers.expected()}")
        if is_direct and "@" in address:
            raise ValueError(
                f"forward is {self.shown_address!r} with a user or a password, which a collector does not take: give "
                "token="
            )
        object.__setattr__(self, "token", self.token or environment.TOKEN.read())
        credentials.check_token(self.token)
        processes.checked_run(self.run or environment.RUN.read() or "run")
        try:
            object.__setattr__(self, "when_full", WhenFull(self.when_full))
        except ValueError:
            known = ", ".join(repr(policy.value) for policy in WhenFull)
            raise ValueError(f"when_full is {self.when_full!r}, expected one of {known}") from None
        for name, least in (("spool_bytes", 1 << 16), ("window_bytes", 1), ("sample_every", 1)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, expected a whole number of at least {least}"
                )
        if not 0 <= self.drain_sec < float("inf"):
            raise ValueError(f"drain_sec is {self.drain_sec!r}, expected a number of seconds, 0 or more")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, or neither")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError(
                "a client certificate needs TLS: give tls_ca, the certificates that verify the collector's"
            )
        if is_direct and self.token and self.tls_ca is None and not self.insecure:
            credentials.refuse_clear(
                host,
                self.address,
                "token",
                cure="give tls_ca (--tls-ca), the certificates that verify the collector's",
            )

    def __repr__(self) -> str:
        """The options, without the token and without passwords."""
        return representation(self, urls=("address",), secrets=("token",))

    @property
    def run_name(self) -> str:
        """Name of the program's run."""
        return self.run or processes.own_run()

    def named(self) -> Forward:
        """Returns a copy whose `run` is `run_name`: another process would make another name."""
        return replace(self, run=self.run_name)

    @property
    def broker(self) -> brokers.Broker:
        """How messages get to the collector."""
        return brokers.broker_of(self.address)

    @property
    def shown_address(self) -> str:
        """The address without a password, for messages."""
        return without_password(self.address)

    @property
    def folder(self) -> Path:
        """Folder of the spools of this user's processes.

        Raises:
            SpoolError: the default folder belongs to another user.
            OSError: it cannot be created.
        """
        if self.spool is not None:
            return Path(self.spool)
        path = Path(tempfile.gettempdir(), f"hostcallback-spool-{os.geteuid()}")
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
            raise errors.SpoolError(
                f"{path} is not a folder that only this user ({os.geteuid()}) can open: remove it, or give spool= "
                "another folder"
            )
        return path


@hide_frames
def forward(
    address: str, *, spool: str | os.PathLike[str] | None = None, run: str = "", **options: Any
) -> Forward:
    """Forwards the messages of a receiver to a collector: `outfeed_receiver(sinks=[hcb.forward("host:7070")])`.

    Args:
        address: `host:port` of the collector, or a NATS server with JetStream, `nats://host:port`.
        spool: the folder that messages are written to before they are sent; None for a folder of this user's.
        run: names the program's run, over all its processes and restarts. Without it, and without
            `$HOSTCALLBACK_RUN`, each start of the program is another run.
        **options: further attributes of `Forward`.

    Raises:
        TypeError: an option is not an attribute of `Forward`.
        ValueError: an option is out of range.

    Example:
        sinks = [hcb.forward("collector:7070", spool="/scratch/spool")]  # for hcb.outfeed_receiver(sinks=sinks)
    """
    return Forward(address, spool=spool, run=run, **options)
