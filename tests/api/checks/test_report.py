"""The report of a failed check, as people read it and as tools do."""

from __future__ import annotations

import copy
import json
import pickle
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from failing import failed_once

import hostcallback as hcb


def inner(x: Any, limit: float) -> Any:
    hcb.check(
        jnp.all(jnp.abs(x) < limit),
        "x of {shape} leaves ±{limit}: {x}", x=x, limit=limit, shape=x.shape,
    )  # fmt: skip
    return x


def report() -> str:
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    return str(caught.value.exceptions[0])


def test_it_shows_the_source_with_the_failing_expression_the_values_and_the_users_stack() -> None:
    hcb.jit(lambda x: inner(x, 5.0))(jnp.arange(100.0))
    text = report().splitlines()
    assert re.fullmatch(r"x of \(100,\) leaves ±5.0: \[ 0\..*", text[0])
    source = text.index("    hcb.check(")
    assert text[source + 1 : source + 3] == [
        "        jnp.all(jnp.abs(x) < limit),",
        "        ~~~~~~~~~~~~~~~~~~~~~~~~~~~",
    ]
    assert "  with limit = 5.0, shape = (100,), x = [ 0., 1., 2., ..., 97., 98., 99.] (float32[100])" in text
    assert any(
        re.fullmatch(r"  first at \d\d:\d\d:\d\d\.\d{6} on cpu:0, message \d+.*", line) for line in text
    )
    assert "  traced from (innermost first):" in text
    stack = "\n".join(text[text.index("  traced from (innermost first):") :])
    assert "hcb.jit(lambda x: inner(x, 5.0))(jnp.arange(100.0))" in stack
    assert "/jax/" not in stack
    assert "hostcallback/api/tap.py" not in stack


@pytest.mark.parametrize("kind", [hcb.CheckError, hcb.NonFiniteError])
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_errors_of_checks_are_pickled_and_copied(kind: Any, again: Any) -> None:
    if kind is hcb.CheckError:
        hcb.jit(lambda x: inner(x, 5.0))(jnp.arange(100.0))
    else:
        hcb.watch_nonfinite(jax.jit(jnp.log))(-1.0)
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    error: Any = caught.value.exceptions[0]
    error.add_note("a note")
    for same in (again(error), again(caught.value).exceptions[0]):
        assert (type(same), str(same), same.__notes__) == (kind, str(error), error.__notes__)
        assert same.check.as_dict() == error.check.as_dict()
        assert same.__dict__.keys() == error.__dict__.keys()


def test_a_check_on_one_line_is_marked_in_characters_not_bytes() -> None:
    größe = jnp.float32(-1)
    hcb.check(größe > 0, "größe {}", größe)
    lines = report().splitlines()
    assert lines[1:3] == [
        '    hcb.check(größe > 0, "größe {}", größe)',
        "              ~~~~~~~~~",
    ]


def test_the_report_has_the_number_and_places_of_failures() -> None:
    jax.pmap(lambda x: inner(x, 0.5))(jnp.arange(4.0))
    assert "  3 failures (1 on cpu:1, 1 on cpu:2, 1 on cpu:3), the last at " in report()


def test_transformations_are_named() -> None:
    jax.vmap(lambda x: inner(x, 0.5))(jnp.arange(2.0))
    assert "  under batch {'batch_dims': (0, None, 0)}" in report()


def test_every_way_to_the_line_is_shown() -> None:
    def first() -> None:
        inner(jnp.float32(9), 1.0)

    def second() -> None:
        inner(jnp.float32(9), 1.0)

    first()
    second()
    text = report()
    assert "first" in text
    assert "  and from:" in text
    assert "2 failures" in text


def test_the_dictionary_is_plain_data() -> None:
    jax.vmap(lambda x: inner(x, 0.5))(jnp.arange(2.0))
    report = failed_once().as_dict()
    assert json.loads(json.dumps(report)) == report
    assert report["message"].startswith("x of () leaves ±0.5: 1.0")
    assert report["elements"] == [1]
    assert report["count"] == 1
    assert report["by_device"] == {"cpu:0": 1}
    assert report["first"]["device"] == "cpu:0"
    assert report["stacks"][0][0]["function"] == "inner"
    assert report["source"][0] == "hcb.check("
    assert report["transforms"] == [["batch", {"batch_dims": [0, None, 0]}]]


def test_without_the_source_file_the_report_does_without_it(tmp_path: Path) -> None:
    program = tmp_path / "gone.py"
    program.write_text("import hostcallback as hcb\nhcb.check(False, 'gone')\n")
    runpy.run_path(str(program))
    program.unlink()
    lines = report().splitlines()
    assert re.fullmatch(r"gone, at .*gone\.py:2 \(<module>\)", lines[0])
    assert not any("~" in line for line in lines)


def test_values_are_short_enough_to_read() -> None:
    hcb.check(False, "{x}", x=["long text " * 100])
    (line,) = [line for line in report().splitlines() if line.startswith("  with x = ")]
    assert len(line) < 230
    assert line.endswith("...")
