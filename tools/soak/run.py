"""The long test: kills processes and collectors until enough messages and kills are done, and writes the report."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tools.soak.accounting import NONE, Held, in_flight, in_segments, is_of, joined, late_ms
from tools.soak.life import Order
from tools.soak.parts import ROOT, START_SEC, Collector, Lives, environment, wait_for_file
from tools.soak.report import DOCUMENT, Totals, report

RECORD_LATE_MS, SPOOL_LATE_MS = 2000.0, 2000.0
"""What is older than this at a kill must be in the log, and in the spool. The documents promise 100 ms and 20 ms, on a
machine that is not overloaded: here several processes share each core."""

RUN = "soak"
SAY_SEC = 30.0
KILL_COLLECTOR = 0.05
SLOW_SECS = (0.0, 0.0, 0.0, 0.0005, 0.02)


class Soak:
    """One run of the test.

    Attributes:
        totals: what it has done and found.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        """Starts the collector and the process that forks the others."""
        self.totals = Totals(seed=seed)
        self._folder = folder
        self._chance = random.Random(seed)
        self._pause = threading.Event()
        self._collector = Collector(folder)
        self._lives = Lives()
        self._spool = folder / "spool"
        self._spooled: dict[
            str, int
        ] = {}  # by epoch, the messages when its process died; -1 once they were compared
        self._number = 0

    def wait(self, seconds: float) -> None:
        """Waits, and looks at the collector."""
        self._pause.wait(seconds)
        self._collector.look()

    def kill_one(self) -> None:
        """Lets a process emit, kills it at a random moment, and looks at what it left."""
        chance, folder = self._chance, self._folder / f"life{self._number}"
        self._number += 1
        order = Order(
            str(folder), self._collector.address, str(self._folder / "spool"), RUN, chance.choice(SLOW_SECS),
            chance.randrange(1 << 30),
        )  # fmt: skip
        pid = self._lives.start(order)
        if chance.random() < 0.9 and not wait_for_file(folder / "started", pid):
            self.totals.faults.append(f"{folder.name} did not start: {(folder / 'out').read_text()[-2000:]}")
        if chance.random() < KILL_COLLECTOR:
            self._collector.kill()
            self.totals.collector_kills += 1
            self._pause.wait(chance.uniform(0.0, 0.5))
            self._collector.start()
        self._pause.wait(chance.choice([0.0, chance.uniform(0.0, 0.2), chance.uniform(0.0, 2.0)]))
        with_signal = chance.choice([signal.SIGKILL] * 4 + [signal.SIGTERM])
        sent_ns = time.time_ns()
        os.kill(pid, with_signal)
        status = self._lives.wait(pid)
        self.totals.kills += 1
        faults = self._examine(folder, pid, sent_ns if with_signal is signal.SIGTERM else 0)
        if status != -with_signal:
            faults.append(f"it ended with {status}, and was sent {with_signal.name}")
        self.totals.faults += [f"{folder.name} (tap of {order.slow_sec} s): {fault}" for fault in faults]
        if faults:
            self.totals.faults.append(f"{folder.name} said: {(folder / 'out').read_text()[-400:]}")
        else:
            shutil.rmtree(folder)
        if not self._number % 20:
            self._collector.look()
            self._compare()

    def _examine(self, folder: Path, pid: int, terminated_ns: int) -> list[str]:
        flight, faults = in_flight(folder / "flight")
        logged, found = in_segments(folder.glob("log/*.hcblog"))
        faults += found + logged.faults("log")
        spooled, found = self._spooled_by(pid)
        faults += found + spooled.faults("spool and collector")
        last = flight if flight.count else logged
        emitted = max(held.end for held in (flight, logged, spooled))
        late = late_ms(logged, last), late_ms(spooled, last)
        totals = self.totals
        totals.messages += emitted
        if terminated_ns:
            earlier = last.numbers[last.times < terminated_ns]
            before = int(earlier[-1]) + 1 if earlier.size else 0
            if min(logged.end, spooled.end) < before:
                faults.append(f"SIGTERM: {before} before it, {logged.end} logged, {spooled.end} spooled")
            return faults
        totals.not_logged += emitted - logged.end
        totals.not_spooled += emitted - spooled.end
        totals.log_late_ms.append(late[0])
        totals.spool_late_ms.append(late[1])
        if flight.count:
            totals.not_anywhere += max(0, int(flight.numbers[0]) - logged.end)
        if late[0] > RECORD_LATE_MS or late[1] > SPOOL_LATE_MS:
            faults.append(f"not logged are {late[0]:.0f} ms before the end, not spooled {late[1]:.0f} ms")
        return faults

    def _spooled_by(self, pid: int) -> tuple[Held, list[str]]:
        # The epoch of its stream is in the names of its spool and of the collector's files.
        stored = self._collector.log / RUN
        candidates = [
            *((path.parent.name.rpartition("~")[2], path) for path in self._spool.glob("*~*/*.hcblog")),
            *((path.name.split("-")[1], path) for path in stored.glob("*.hcblog")),
        ]
        epoch = next(
            (epoch for epoch, path in candidates if epoch not in self._spooled and is_of(path, pid)), ""
        )
        if not epoch:
            return Held(NONE, NONE), []
        spooled, faults = in_segments(self._spool.glob(f"*~{epoch}/*.hcblog"))
        sent, found = in_segments(stored.glob(f"*-{epoch}-*.hcblog"))
        whole = joined(sent, spooled)
        self._spooled[epoch] = whole.end
        return whole, faults + found

    def _compare(self) -> None:
        # What a process's spool had when it died is at the collector once the spool is gone: once, in order.
        for epoch, had in self._spooled.items():
            if had < 0 or list(self._spool.glob(f"*~{epoch}")):
                continue
            self._spooled[epoch] = -1
            paths = list((self._collector.log / RUN).glob(f"*-{epoch}-*.hcblog"))
            stored, faults = in_segments(paths)
            faults += stored.faults("collector")
            if stored.end != had:
                faults.append(f"{had} were spooled, {stored.end} are stored")
            self.totals.stored += stored.count
            self.totals.faults += [f"stream {epoch}: {fault}" for fault in faults]
            for path in paths if not faults else ():
                path.unlink()

    def stop(self) -> None:
        """Ends all processes at once, after an error of the test itself."""
        self._lives.close()
        self._collector.kill()

    def end(self) -> None:
        """Lets a last process send what dead ones left, and ends the collector."""
        order = Order(
            str(self._folder / "last"), self._collector.address, str(self._folder / "spool"), RUN, 0.0, 0, 1000,
            START_SEC,
        )  # fmt: skip
        status = self._lives.wait(self._lives.start(order))
        if status:
            self.totals.faults.append(f"the last process ended with {status}")
        deadline = time.monotonic() + START_SEC
        while list(self._spool.glob("*~*")) and time.monotonic() < deadline:
            self._pause.wait(0.1)
        self._lives.close()
        if self._collector.stop():
            self.totals.faults.append("the collector ended with an error")
        self._compare()
        left = [epoch for epoch, had in self._spooled.items() if had >= 0]
        self.totals.faults += [f"stream {epoch}: its spool was not sent" for epoch in left]
        self.totals.faults += self._collector.faults()
        self.totals.collector_kib = self._collector.most_kib


def _read_steady(process: subprocess.Popen[str], totals: Totals) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        found = json.loads(line)
        totals.steady_messages += found["emitted"]
        totals.dropped += found["dropped"]
        totals.faults += found["faults"]
        totals.usage.append((found["rss_kib"], found["files"], found["threads"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak.py", description=__doc__)
    parser.add_argument("--messages", type=float, default=1e8, help="messages of the steady process (1e8)")
    parser.add_argument("--kills", type=int, default=1000, help="processes to kill (1000)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="ends after this time, whatever is done (60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and options (0)")
    parser.add_argument("--no-write", action="store_true", help="prints the report, and writes no document")
    return parser.parse_args()


def _run(folder: Path, arguments: argparse.Namespace) -> Totals:
    soak = Soak(folder, arguments.seed)
    seconds = 60.0 * arguments.minutes
    with (folder / "errors").open("wb") as errors:
        steady = subprocess.Popen(
            [sys.executable, "-m", "tools.soak.steady", str(int(arguments.messages)), str(0.95 * seconds), folder],
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment(),
        )  # fmt: skip
    reader = threading.Thread(target=_read_steady, args=(steady, soak.totals))
    reader.start()
    try:
        _kill_until(soak, steady, seconds, arguments.kills)
    except BaseException:
        soak.stop()
        raise
    finally:
        ended = steady.poll()
        if ended is None:
            steady.terminate()
        reader.join()
        steady.wait()
    if ended:
        soak.totals.faults.append((folder / "errors").read_text(errors="replace")[-4000:])
    soak.end()
    return soak.totals


def _kill_until(soak: Soak, steady: subprocess.Popen[str], seconds: float, kills: int) -> None:
    began = said = time.monotonic()
    totals = soak.totals
    while (now := time.monotonic()) - began < seconds and (totals.kills < kills or steady.poll() is None):
        if totals.kills < kills:
            soak.kill_one()
        else:
            soak.wait(1.0)
        totals.seconds = time.monotonic() - began
        if now - said > SAY_SEC:
            said = now
            print(totals.line(), flush=True)


def main() -> int:
    """Runs the command; returns 1 if there were faults."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        totals = _run(Path(name), arguments)
    text = report(totals, arguments.messages, arguments.kills)
    print(text)
    if not arguments.no_write:
        DOCUMENT.write_text(text, encoding="utf-8")
    return 1 if totals.faults else 0
