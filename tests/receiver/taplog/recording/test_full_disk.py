"""A training program goes on when its log cannot be written, and reports the missing messages."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import run_python

PROGRAM = """
import resource, sys, warnings
import jax.numpy as jnp
from jax import lax
import hostcallback as hcb

hcb.record(sys.argv[1] + "/other").close()  # everything is loaded and compiled before files are limited
delivered = 0
def take(x):
    global delivered
    delivered += 1
def body(x, step):
    hcb.id_tap(take, {"x": x, "step": step}, name="x")
    return x + 1, None
program = hcb.jit(lambda x: lax.scan(body, x, jnp.arange(2000))[0])
program(jnp.float32(0)).block_until_ready()
hcb.barrier_wait()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with hcb.outfeed_receiver(record=sys.argv[1]) as rx:
        program(jnp.float32(0))
        hcb.barrier_wait()
        # Files may not become longer than the log is now and a bit: as on a disk that is full.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (rx.recorder.counters.nbytes + 5000, hard))
        program(jnp.float32(10_000))
        hcb.barrier_wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        program(jnp.float32(20_000))
        hcb.barrier_wait()
(row,) = [row for row in rx.stats if row.delivered]
print("delivered", delivered, row.delivered)
print("unrecorded", row.unrecorded, rx.recorder.counters.lost_messages, rx.recorder.counters.lost_bytes)
print("summary", rx.summary().splitlines()[-1])
for warning in caught:
    print("warning", warning.category.__name__, warning.message)
"""


@pytest.mark.slow
def test_the_program_goes_on_and_the_loss_is_counted_and_reported(tmp_path: Path) -> None:
    result = run_python("-c", PROGRAM, tmp_path)
    assert result.returncode == 0, result.stderr
    said = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    assert said["delivered"] == "8000 6000"
    unrecorded, lost_messages, lost_bytes = map(int, said["unrecorded"].split())
    assert unrecorded == lost_messages
    assert 0 < unrecorded <= 2_000
    assert lost_bytes == 192 * unrecorded
    assert said["summary"] == f"{unrecorded:,} message(s) could not be recorded"
    assert said["warning"].startswith(
        f"RecordingWarning {unrecorded} message(s) were delivered but not recorded"
    )
    assert "File too large" in said["warning"]
    assert result.stderr.count("messages cannot be recorded (File too large)") == 1
    assert result.stderr.count("recording works again") == 1

    records = list(LogReader(tmp_path).records())
    messages = [r for r in records if isinstance(r, LoggedMessage)]
    (note,) = [r.lost for r in records if isinstance(r, LostNote)]
    assert len(records) == len(messages) + 1  # and no damage
    assert len(messages) == 6_000 - unrecorded
    assert (note.messages, note.nbytes) == (unrecorded, lost_bytes)
    assert "File too large" in note.reason
    first = messages[0].message.seq
    missing = set(range(first, first + 6_000)) - {m.message.seq for m in messages}
    assert (min(missing), max(missing)) == (note.first_seq, note.last_seq)
    assert len(missing) == unrecorded


def record_and_delete(folder: Path, own: bool, dropped: int) -> hcb.OutfeedReceiver:
    with hcb.outfeed_receiver(record=hcb.record(folder) if own else folder) as rx:
        hcb.id_tap(lambda x: None, jnp.float32(0))
        hcb.barrier_wait()
        assert rx.recorder is not None
        rx.recorder.flush()  # finds the first message in its file
        shutil.rmtree(folder)
        for i in range(7):
            hcb.id_tap(lambda x: None, jnp.float32(i))
        if dropped:
            rx.recorder.lose("cpu:0", dropped, "dropped: no room")
    rx.recorder.close()
    return rx


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dropped", [0, 10])
def test_messages_after_the_folder_was_deleted_are_reported_as_lost_and_unnoted(
    tmp_path: Path, own: bool, dropped: int
) -> None:
    said = f"^7 message.* The log has no note of {7 + dropped} missing message"
    with pytest.warns(hcb.RecordingWarning, match=said):
        rx = record_and_delete(tmp_path / "log", own, dropped)
    assert sum(row.unrecorded for row in rx.stats) == 7
