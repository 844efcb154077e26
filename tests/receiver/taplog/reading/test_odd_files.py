"""Pipes, folders, links and sparse files called like segments neither hang the reading of a log nor fail it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hcb_command import hcb as command
from hostcallback.receiver.ui.index.log_files import LogFiles

TERABYTE = 1 << 40
STRAYS = ("fifo", "folder", "loop", "sparse", "zero")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of three messages among such files, one of which is a copy of a segment that ends in a hole."""
    folder = tmp_path_factory.mktemp("odd")
    log = folder / "log"
    with hcb.outfeed_receiver(record=log):
        for step in range(3):
            jax.jit(lambda x: hcb.id_tap(lambda value: None, x, name="loss"))(jnp.int32(step))
    (segment,) = log.iterdir()
    os.mkfifo(log / "fifo.hcblog")
    (log / "folder.hcblog").mkdir()
    for name, target in {"dangling": "/nowhere", "zero": "/dev/zero", "loop": "."}.items():
        (log / f"{name}.hcblog").symlink_to(target)
    with (log / "sparse.hcblog").open("wb") as file:
        file.truncate(TERABYTE)
    shutil.copy(segment, log / "torn.hcblog")
    with (log / "torn.hcblog").open("r+b") as file:
        file.truncate(segment.stat().st_size - 200)
        file.truncate(TERABYTE)
    return folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["cat", "stats", "errors", "replay"])
def test_a_command_reads_the_log_and_names_the_files(folder: Path, name: str) -> None:
    done = command(folder, name, "log")
    assert "log/torn.hcblog: damaged: no chunk starts here, or after it" in done.stderr
    assert "left out, because no tap logs: " in done.stderr
    assert all(f"log/{stray}.hcblog" in done.stderr for stray in STRAYS)
    if name == "cat":
        assert {line.split()[3] for line in done.stdout.splitlines()} == {"loss"}


@pytest.mark.parametrize("stray", ["fifo", "zero"])
def test_such_a_file_alone_is_refused(folder: Path, stray: str) -> None:
    done = command(folder, "cat", f"log/{stray}.hcblog")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"log/{stray}.hcblog is no regular file, expected a segment of a tap log" in done.stderr


@pytest.mark.timeout(60)
def test_the_page_names_them_too(folder: Path) -> None:
    files = LogFiles([folder / "log"])
    files.find()
    assert len(files.segments) == 2
    assert all(files.new_chunks(segment) for segment in files.segments)
    told = "\n".join(files.problems)
    assert all(f"{stray}.hcblog" in told for stray in STRAYS)
