"""What is created for messages is for its user, or for the group that an option names, with any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest

import hostcallback as hcb
from collecting import LOSS, CollectorProcess, Emitter, forwarder, free_port, wait_for
from hostcallback.receiver.cli import main
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.files import PRIVATE, Permissions, write_private
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.control.rule_store import NAME, RuleStore
from hostcallback.receiver.remote.delivery.cursor import Cursor
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.nats.collector import NatsStore
from hostcallback.receiver.taplog.flight.recorder import FlightRecorder

KEY = StreamKey("run", 0, "0123456789abcdef")


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Permissions of everything below a folder, by what it is and has."""
    found = {}
    for path in folder.rglob("*"):
        found[str(path.relative_to(folder))] = stat.S_IMODE(path.lstat().st_mode)
    return found


def check(folder: Path, file: int, directory: int, *, files: int = 1) -> None:
    assert sum(path.is_file() for path in folder.rglob("*")) >= files
    for name, mode in modes(folder).items():
        assert oct(mode) == oct(directory if (folder / name).is_dir() else file), name


def record(folder: Path) -> None:
    with hcb.record(folder / "a" / "b") as recorder:
        Emitter(recorder).emit(LOSS, np.float32(1))


def spool(folder: Path) -> None:
    with forwarder(f"localhost:{free_port()}", folder / "a" / "b", drain_sec=0.0) as sending:
        Emitter(sending).emit(LOSS, np.float32(1))


def flight(folder: Path) -> None:
    FlightRecorder(folder / "a" / "b")


def store(folder: Path) -> None:
    made = Store(folder / "a" / "b")
    made.open(KEY)
    made.open(KEY)._begin(1)
    cursor = Cursor(made.directory)
    cursor.move(KEY, StreamOffset(1, 0))
    cursor.save()
    RuleStore().write(made.directory / NAME)
    NatsStore(made)
    made.close()


def plain(folder: Path) -> None:
    PRIVATE.make_folder(folder / "a" / "b")
    write_private(folder / "a" / "b" / "file", msgpack.packb(1))
    os.close(PRIVATE.open(folder / "a" / "b" / "other", os.O_WRONLY))


@pytest.mark.parametrize("create", [record, spool, flight, store, plain])
def test_only_the_user_can_read_what_is_created(
    tmp_path: Path, umask: int, create: Callable[[Path], None]
) -> None:
    create(tmp_path)
    check(tmp_path, 0o600, 0o700)


@pytest.mark.parametrize(
    ("mode", "folders"), [(0o640, 0o750), (0o644, 0o755), (0o660, 0o770), (0o666, 0o777)]
)
def test_a_recorder_lets_others_read(tmp_path: Path, umask: int, mode: int, folders: int) -> None:
    with hcb.record(tmp_path / "a" / "b", mode=mode, segment_bytes=1) as recorder:
        emitter = Emitter(recorder)
        for k in range(3):
            emitter.emit(LOSS, np.float32(k))
            recorder.flush()
    check(tmp_path, mode, folders)


@pytest.mark.parametrize("mode", [0, 0o400, 0o040, 0o700, 0o1600, 0o620, 0o602, 0o755, -1, "0o640", None])
def test_modes_that_a_log_cannot_have_are_refused(tmp_path: Path, mode: object) -> None:
    with pytest.raises(ValueError, match="expected permissions of files"):
        hcb.record(tmp_path / "log", mode=mode)  # type: ignore[arg-type]
    assert not modes(tmp_path)


def test_what_exists_keeps_its_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        path.chmod(0o2775)
    (folder / ".collector").touch()
    (folder / ".collector").chmod(0o644)
    before = modes(tmp_path)
    for create in (record, spool, store):
        create(tmp_path)
    after = modes(tmp_path)
    assert {name: after[name] for name in before} == before
    assert all(mode & 0o077 == 0 for name, mode in after.items() if name not in before)


@pytest.mark.parametrize("group", [False, True])
def test_a_collector_stores_for_its_user_or_for_a_group(tmp_path: Path, group: bool) -> None:
    number = 54321 if os.geteuid() == 0 else os.getegid()
    options = ["--group", str(number)] if group else []
    metrics = tmp_path / "metrics.jsonl"
    with CollectorProcess(tmp_path, "--metrics", str(metrics), *options) as collector:
        with forwarder(collector.address, tmp_path / "spool", drain_sec=60) as sending:
            Emitter(sending).emit(LOSS, np.float32(1))
        wait_for(lambda: list(collector.log.glob("run/*.hcblog")), "the log")
    segments = list((collector.log / "run").glob("*.hcblog"))
    assert segments
    shared = [*segments, metrics, collector.log, collector.log / "run"]
    for path in shared:
        found = path.stat()
        expected = (0o750 if path.is_dir() else 0o640) if group else 0o700 if path.is_dir() else 0o600
        assert oct(stat.S_IMODE(found.st_mode)) == oct(expected), path
        assert not group or found.st_gid == number
    for path in collector.log.iterdir():
        assert path in shared or stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_group_that_does_not_exist_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["collect", "--listen", "localhost:0", "--log", str(tmp_path / "log"), "--group", "no-such"])
        != 0
    )
    assert "--group no-such: this machine has no such group" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / "link", tmp_path / "link" / "x"):
        with pytest.raises((OSError, HostCallbackError)):
            PRIVATE.make_folder(path)
    assert Permissions(0o644).folder_mode == 0o755
