"""Disks that are really full, at the collector and at the process: file systems that only root may mount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from collecting import CollectorProcess, Emitter, all_stored, forwarder, only, stored, wait_for
from hostcallback.receiver.errors import SpoolError

pytestmark = pytest.mark.slow


class SmallDisk:
    """A file system in memory.

    Attributes:
        path: its mount point.
    """

    def __init__(self, path: Path, kilobytes: int) -> None:
        self.path = path
        path.mkdir()
        if not self._mount(f"size={kilobytes}k"):
            pytest.skip("no file system can be mounted: that takes root")

    def enlarge(self) -> None:
        assert self._mount("remount,size=64m")

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", self.path], check=True)

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.path]
        try:
            return subprocess.run(command, check=False, capture_output=True).returncode == 0
        except FileNotFoundError:
            return False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "disk", 512)
    try:
        yield small
    finally:
        small.unmount()


def test_a_collector_takes_everything_when_its_disk_has_room_again(disk: SmallDisk, tmp_path: Path) -> None:
    with CollectorProcess(disk.path, "--quiet") as collector:
        recorders = [
            forwarder(collector.address, tmp_path / f"spool{number}", process_index=number, drain_sec=90)
            for number in (0, 1)
        ]
        emitters = [Emitter(recorder) for recorder in recorders]
        for _ in range(40):
            for emitter in emitters:
                emitter.losses(100)
                emitter.recorder.flush()
        wait_for(lambda: any("No space left on device" in line for line in collector.errors), "a full disk")
        assert all(recorder.unsent_bytes for recorder in recorders)
        assert not any(recorder.refused for recorder in recorders)
        disk.enlarge()
        for recorder in recorders:
            recorder.close()
            assert not recorder.unsent_bytes
        assert collector.stop() == 0
    assert list(all_stored(collector.log).values()) == [list(range(4_000))] * 2


def test_a_program_goes_on_when_the_disk_of_its_spool_is_full(disk: SmallDisk, tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        collector.kill()
        recorder = forwarder(collector.address, disk.path / "spool", drain_sec=60)
        emitter = Emitter(recorder)
        for _ in range(40):
            emitter.losses(100)
            recorder.flush()
        assert recorder.counters.lost_messages
        assert recorder.counters.failure == "No space left on device"
        with pytest.raises(
            SpoolError, match=r"nothing can be written there \(No space left on device\): give spool="
        ):
            forwarder(collector.address, disk.path / "spool")
        disk.enlarge()
        emitter.losses(100)
        recorder.flush()
        collector.start()
        recorder.close()
        assert not recorder.unsent_bytes
        assert collector.stop() == 0
    found, lost = stored(collector.log)
    seqs = only(found)
    assert list(seqs) == sorted(set(seqs))
    assert seqs[-1] == 4_099
    assert len(seqs) + sum(note.messages for note in lost) == emitter.seq
    assert {note.reason for note in lost} == {"the log could not be written: No space left on device"}
    missing = set(range(emitter.seq)) - set(seqs)
    assert min(missing) == min(note.first_seq for note in lost)
    assert max(missing) == max(note.last_seq for note in lost)
