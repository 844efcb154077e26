"""Writes files that later versions must read: `python tools/make_kept_files.py NAME`.

A set is a tap log, a spool and a flight recording. tests/receiver/kept/test_kept_files.py reads every set.
docs/contributing.md says when to add one; none is ever changed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "receiver" / "kept"
PROGRAM = FOLDER / "train.py"
HOST = "host"

# The files are public: the program sees neither this machine's name nor the path of this tree.
START = f"""
import platform, sys
platform.node = lambda: {HOST!r}
sys.argv = ["train.py", *sys.argv[2:]]
exec(compile(open({str(PROGRAM)!r}).read(), "train.py", "exec"))
"""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "HOSTCALLBACK_TRANSPORT": "native",
    "HOSTCALLBACK_RING_BYTES": "65536",
    "HOSTCALLBACK_RUN": "kept",
    "TZ": "UTC",
}


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    """Runs Python in a folder; returns its standard output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != status:
        raise SystemExit(f"{arguments} ended with {done.returncode}, expected {status}:\n{done.stderr}")
    return done.stdout


def hcb(folder: Path, *arguments: str, status: int = 0) -> str:
    """Runs the `hcb` command in a folder; returns its standard output."""
    return run(folder, "-m", "hostcallback.receiver.cli", *arguments, status=status)


def check_private(folder: Path) -> None:
    """Raises SystemExit if a file names this machine or this tree."""
    for path in folder.rglob("*"):
        contents = path.read_bytes() if path.is_file() else b""
        for word in (str(ROOT), str(Path.home()), os.uname().nodename, tempfile.gettempdir()):
            if word.encode() in contents:
                raise SystemExit(f"{path.relative_to(folder)} contains {word!r}, which others would see")


def make(folder: Path) -> None:
    """Writes the files, and what this version reads in them."""
    run(folder, "-c", START, "-", "record", "log")
    run(folder, "-c", START, "-", "die", "spool", "flights", status=-signal.SIGKILL)
    (folder / "log.jsonl").write_text(hcb(folder, "cat", "--json", "log"))
    (folder / "replay.txt").write_text(hcb(folder, "replay", "log", status=1))
    (stream,) = (folder / "spool").iterdir()
    (folder / "spool.jsonl").write_text(hcb(folder, "cat", "--json", str(stream)))
    (folder / "recovered.jsonl").write_text(hcb(folder, "recover", "--json", "flights"))
    check_private(folder)
    # A ring's file is large, and almost all zeros.
    with tarfile.open(folder / "flights.tar.xz", "w:xz") as archive:
        archive.add(folder / "flights", "flights", filter=_without_owner)
    for path in sorted((folder / "flights").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "flights").rmdir()


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main(arguments: list[str]) -> int:
    """Makes the set; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="such as the version of the package; the set must not exist")
    target = FOLDER / parser.parse_args(arguments).name
    if target.exists():
        print(f"{target} exists: a set is never changed; give another name", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "set"
        folder.mkdir()
        make(folder)
        subprocess.run(["cp", "-r", str(folder), str(target)], check=True)
    for path in sorted(target.rglob("*")):
        if path.is_file():
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
