"""Paths of control sockets, and the checks of their owners."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from receiver import environment
from receiver.control.errors import ControlSocketError

SUFFIX = ".sock"

_LOCAL_PEERCRED = 1  # macOS, sys/un.h


class Peer(NamedTuple):
    """The process at the other end of a socket.

    Attributes:
        uid: its user.
        pid: its process id; 0 where the system does not tell.
    """

    uid: int
    pid: int


def directory() -> Path:
    """Folder of this process's socket: `$HOSTCALLBACK_CONTROL_DIR`, or a folder that belongs to the user."""
    return _directories(os.geteuid())[0]


def _directories(uid: int) -> list[Path]:
    found = []
    if named := environment.CONTROL_DIR.read():
        found.append(named)
    own = os.environ.get("XDG_RUNTIME_DIR", "").strip() if uid == os.geteuid() else ""
    for runtime in (own, f"/run/user/{uid}"):
        if runtime and os.path.isdir(runtime):
            found.append(Path(runtime, "hostcallback"))
    found.append(Path(f"/tmp/hostcallback-{uid}"))
    return list(dict.fromkeys(found))


def make_directory() -> Path:
    """Returns the folder, created if it does not exist, which only its user can open.

    Raises:
        ControlSocketError: it belongs to another user, or is not a folder.
        OSError: it cannot be created.
    """
    path = directory()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_others(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o700)
    return path


def refuse_others(path: Path) -> None:
    """Raises ControlSocketError if a folder or a socket is neither this user's nor the superuser's."""
    # lstat: a link of another user could lead to this user's own folder.
    found = path.lstat()
    if found.st_uid not in _trusted():
        raise ControlSocketError(
            f"{path} belongs to the user {found.st_uid}, and this process is {os.geteuid()}'s: have that user remove "
            f"it, or name another folder in {environment.CONTROL_DIR}"
        )
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISSOCK(found.st_mode)):
        raise ControlSocketError(
            f"{path} is neither a folder nor a socket: remove it, or name another folder in {environment.CONTROL_DIR}"
        )


def _trusted() -> set[int]:
    return {0, os.geteuid()}


def peer_of(connection: socket.socket) -> Peer | None:
    """The process at the other end; None where the system does not tell (then the folder's permissions decide)."""
    if hasattr(socket, "SO_PEERCRED"):
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", found)
        return Peer(uid, pid)
    if sys.platform == "darwin":
        _, uid = struct.unpack_from("2I", connection.getsockopt(0, _LOCAL_PEERCRED, 128))
        return Peer(uid, 0)
    return None


def may_control(peer: Peer | None) -> bool:
    """Whether a client may control this process: its user is this process's, or the superuser."""
    return peer is None or peer.uid in _trusted()


def answers(path: Path) -> bool:
    """Whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # such as a full queue: a process listens
            return True
        return True


def remove_stale(folder: Path) -> None:
    """Removes the sockets of processes that have ended."""
    for path in folder.glob(f"*{SUFFIX}"):
        if not answers(path):
            path.unlink(missing_ok=True)


def sockets() -> dict[int, Path]:
    """The sockets that this user can reach, by process id; the superuser reaches those of all users."""
    folders = _directories(os.geteuid())
    if os.geteuid() == 0:
        folders += [*Path("/tmp").glob("hostcallback-*"), *Path("/run/user").glob("*/hostcallback")]
    found: dict[int, Path] = {}
    for folder in dict.fromkeys(folders):
        try:
            names = [path for path in folder.iterdir() if path.suffix == SUFFIX and path.stem.isdigit()]
        except OSError:
            continue
        for path in names:
            found.setdefault(int(path.stem), path)
    return found
