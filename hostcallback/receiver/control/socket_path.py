"""Paths of control sockets, and the checks of their owners."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hostcallback.receiver import environment
from hostcallback.receiver.control.protocol import ControlSocketError
from hostcallback.receiver.processes import is_alive

SUFFIX = ".sock"

OWN = "hostcallback-"
"""Begins the name of the folder of sockets; the user's id follows."""

_NAME = re.compile(r"\d{1,19}\.sock|\.(?P<unpublished>\d{1,19})-[0-9a-f]{6}")
"""Names of sockets, and of those that are not yet published."""

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
    """Folder of this process's socket: in `$HOSTCALLBACK_CONTROL_DIR`, or in a folder that belongs to the user."""
    return _directories(os.geteuid())[0]


def _directories(uid: int) -> list[Path]:
    found = []
    if named := environment.CONTROL_DIR.read():
        found.append(named / f"{OWN}{uid}")
    own = os.environ.get("XDG_RUNTIME_DIR", "").strip() if uid == os.geteuid() else ""
    for runtime in (own, f"/run/user/{uid}"):
        if runtime and os.path.isdir(runtime):
            found.append(Path(runtime, "hostcallback"))
    found.append(Path(f"/tmp/{OWN}{uid}"))
    return list(dict.fromkeys(found))


def make_directory() -> Path:
    """Returns the folder, created if it does not exist, which only its user can open.

    The folder around it is the user's, and may hold anything: nothing in it is read, changed or removed.

    Raises:
        ControlSocketError: the folder, or the one around it, belongs to another user, or is not a folder; or other
            users can open the folder.
        OSError: it cannot be created.
    """
    path = directory()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if environment.CONTROL_DIR.read():
        _refuse_foreign(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    refuse_others(path)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise ControlSocketError(
            f"{path} is not a folder that only this user ({os.geteuid()}) can open: remove it, or name another "
            f"folder in {environment.CONTROL_DIR}"
        )
    return path


def _refuse_foreign(around: Path) -> None:
    # Both the folder and, if the path is a link, the link: who owns the link can lead it elsewhere.
    for found in (around.lstat(), around.stat()):
        if found.st_uid not in _trusted():
            raise ControlSocketError(
                f"{around} belongs to the user {found.st_uid}, and this process is {os.geteuid()}'s: name a folder of "
                f"this user in {environment.CONTROL_DIR}"
            )


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
    """The process at the other end; None on systems that do not tell (the folder's permissions decide there)."""
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
    """Whether a process listens at a socket. Does not wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # such as a full queue: a process listens
            return True
        return True


@contextlib.contextmanager
def locked(folder: Path, wait_sec: float) -> Iterator[bool]:
    """Locks the folder against other processes; yields False if another one holds the lock for `wait_sec` seconds.

    The lock is on the folder itself, so it leaves no file. A process that ends gives it up.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _lock(descriptor, wait_sec)
    finally:
        with contextlib.suppress(OSError):
            # Closing is not enough: a child that another thread has forked meanwhile holds the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, wait_sec: float) -> bool:
    deadline = time.monotonic() + wait_sec
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        except OSError:  # the file system has no locks
            return False
        else:
            return True


def remove_stale(folder: Path) -> None:
    """Removes the sockets of processes that have ended. The caller holds the folder's lock."""
    for path in folder.iterdir():
        found = _NAME.fullmatch(path.name)
        if found is None or not is_own_socket(path) or answers(path):
            continue
        # A socket that is not yet published may belong to a process that is about to listen.
        if found["unpublished"] and is_alive(int(found["unpublished"])):
            continue
        # A process that did not get the lock may have put its socket there since: the answer is that of the file moved.
        removed = unpublished_name(folder)
        with contextlib.suppress(FileNotFoundError):
            path.rename(removed)
            if answers(removed):
                removed.rename(path)
            else:
                removed.unlink()


def unpublished_name(folder: Path) -> Path:
    """A new name for a socket of this process that clients do not look for; removed by others when the process ends."""
    return folder / f".{os.getpid()}-{secrets.token_hex(3)}"


def is_own_socket(path: Path) -> bool:
    """Whether a path is a socket of this user. Links are not followed."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def sockets() -> dict[int, Path]:
    """The sockets that this user can reach, by process id; the superuser reaches those of all users."""
    folders = _directories(os.geteuid())
    if os.geteuid() == 0:
        around = [Path("/tmp"), *([named] if (named := environment.CONTROL_DIR.read()) else [])]
        folders += [found for folder in around for found in folder.glob(f"{OWN}*")]
        folders += Path("/run/user").glob("*/hostcallback")
    found: dict[int, Path] = {}
    for folder in dict.fromkeys(folders):
        try:
            names = [path for path in folder.iterdir() if path.suffix == SUFFIX and path.stem.isdigit()]
        except OSError:
            continue
        for path in names:
            found.setdefault(int(path.stem), path)
    return found
