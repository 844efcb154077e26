"""The folders of the native library include each other in one direction, and no header includes itself."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkout import ROOT

SOURCES = ROOT / "receiver" / "native"

ROOMS = ("abi", "third_party", "os", "wire", "rules", "gpu", "ring", "handlers", "reductions", "exports")
"""From the bottom up: a file includes only files of the same folder and of earlier folders."""

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def room_of(file: str) -> str:
    """The layer of a file: its folder, but only the headers of `abi/` are the lowest layer."""
    folder = file.partition("/")[0]
    return "exports" if folder == "abi" and file.endswith(".cc") else folder


def includes(sources: Path) -> dict[str, set[str]]:
    """The files that each file includes, by their paths below the folder of sources."""
    files = [path for path in sources.rglob("*") if path.suffix in (".cc", ".h")]
    return {
        path.relative_to(sources).as_posix(): set(INCLUDE.findall(path.read_text(encoding="utf-8")))
        for path in files
    }


def upward(graph: dict[str, set[str]]) -> Iterator[str]:
    """Every include of a file that does not exist, or that is in a higher layer."""
    for file, included in graph.items():
        for other in included:
            if other not in graph:
                yield f"{file} includes {other}, which is no file: write its path below receiver/native"
            elif ROOMS.index(room_of(other)) > ROOMS.index(room_of(file)):
                yield f"{file} includes {other}, of a higher room"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The files of a circle of includes; empty if none exists."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_file_is_in_a_layer() -> None:
    graph = includes(SOURCES)
    assert len(graph) > 40
    assert {room_of(file) for file in graph} == set(ROOMS)


def test_includes_lead_from_a_layer_to_lower_layers() -> None:
    assert list(upward(includes(SOURCES))) == []


def test_no_includes_form_a_circle() -> None:
    assert circle(includes(SOURCES)) == []


@pytest.mark.parametrize(
    ("file", "included", "text"),
    [
        ("os/clock.h", "ring/ring.h", "os/clock.h includes ring/ring.h, of a higher room"),
        ("wire/frame.h", "rules/rule.h", "wire/frame.h includes rules/rule.h, of a higher room"),
        ("ring/ring.h", "block_pool.h", "which is no file"),
    ],
)
def test_a_planted_include_is_found(file: str, included: str, text: str) -> None:
    graph = includes(SOURCES)
    graph[file].add(included)
    assert any(text in found for found in upward(graph))


def test_a_planted_circle_is_found() -> None:
    graph = includes(SOURCES)
    graph["ring/block_pool.h"].add("ring/ring.h")
    assert {"ring/ring.h", "ring/block_pool.h"} <= set(circle(graph))
