"""What parses foreign text takes time and memory in proportion to its size, or refuses it."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hostcallback.receiver import limits, text
from hostcallback.receiver.control import protocol
from hostcallback.receiver.control.rule_file import read_rules
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.remote import forwarding_protocol as remote
from hostcallback.receiver.sinks import described_template
from hostcallback.receiver.tap_arguments import matches
from hostcallback.receiver.ui.server.requests import parse

KIB = int(os.environ.get("HOSTILE_KIB", "64"))
"""The size of each text; `make fuzz` takes the largest that the limits let pass."""

SEC_PER_MIB, BYTES_PER_BYTE = 30.0, 400.0


def _rules(tmp_path: Path, data: str) -> Any:
    path = tmp_path / "rules.toml"
    path.write_text(data)
    return lambda: read_rules(path)


RULE_FILES = {
    "one long key": lambda n: "a." * (n // 2) + "a = 1",
    "keys of many parts": lambda n: "".join(
        f"a{i}" + ".b" * limits.RULE_FILE_DOTS + " = 1\n" for i in range(n // 20)
    ),
    "tables of many parts": lambda n: "".join(
        f"[a{i}" + ".b" * limits.RULE_FILE_DOTS + "]\n" for i in range(n // 17)
    ),
    "many tables": lambda n: "".join(f"[t{i}]\nevery = 1\n" for i in range(n // 18)),
    "nested arrays": lambda n: "x = " + "[" * n,
    "nested tables": lambda n: "x = " + "{a=" * (n // 3),
    "dots in inline tables": lambda n: "x = {" + "a." * (n // 2) + "a=1}",
    "arrays of tables": lambda n: "[[a]]\n" * (n // 6),
    "quotes": lambda n: "x = " + "'\"" * (n // 2),
    "brackets": lambda n: "[" * n + "\n",
}
TEXTS: dict[str, Callable[[int], str]] = {
    "letters": lambda n: "a" * n,
    "braces": lambda n: "{" * n,
    "fields": lambda n: "{0}" * (n // 3),
    "steps of a field": lambda n: "{0" + "[0]" * (n // 3) + "}",
    "attributes of a field": lambda n: "{0" + ".a" * (n // 2) + "}",
    "stars": lambda n: "*" * n,
    "stars and letters": lambda n: "*a" * (n // 2),
    "escapes": lambda n: "\x1b[31m" * (n // 5),
    "urls": lambda n: "http://a:b@" * (n // 11),
    "arrays": lambda n: "[" * n,
    "objects": lambda n: '{"a":' * (n // 5),
    "numbers": lambda n: "1" * n,
    "bidi": lambda n: "\u202e" * (n // 3),
}
READERS: dict[str, Callable[[str], Any]] = {
    "a request of control": lambda data: protocol.unpack(data.encode()),
    "a request of the page": lambda data: parse(data.encode()),
    "a map of a stream": lambda data: remote.decode_map(data.encode()),
    "a template": lambda data: described_template.fill(data, [1.0], {}),
    "a text for the terminal": text.printable_lines,
    "an address": text.without_password,
    "a pattern": lambda data: matches("layers/attention@train.py:12", data[:4096]),
    "a name": lambda data: matches(data[:4096], "*a*a*a*b"),
}
REFUSED = (HostCallbackError, ValueError, LookupError)


def check_cost(read: Callable[[], Any], size: int) -> None:
    start = time.thread_time()
    with suppress(*REFUSED):
        read()
    assert time.thread_time() - start < 0.5 + SEC_PER_MIB * size / (1 << 20)
    tracemalloc.start()
    try:
        with suppress(*REFUSED):
            read()
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + BYTES_PER_BYTE * size
    finally:
        tracemalloc.stop()


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("kind", RULE_FILES)
def test_a_file_of_rules(kind: str, tmp_path: Path) -> None:
    data = RULE_FILES[kind](min(KIB << 10, limits.RULE_FILE_BYTES))
    check_cost(_rules(tmp_path, data), len(data))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_from_outside(kind: str, reader: str) -> None:
    data = TEXTS[kind](KIB << 10)
    check_cost(lambda: READERS[reader](data), len(data))
