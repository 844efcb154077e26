"""The pytest plugin: failures of taps belong to their test, checks look like asserts, `taps` captures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from checkout import ROOT
from plugin_pytest import run_pytest

SUITE = """
import jax
import jax.numpy as jnp
import pytest
import hostcallback as hcb


def save(value):
    raise OSError("disk full")


def collect(value):
    try:
        save(value)
    except OSError as error:
        raise ExceptionGroup("several", [ValueError("never raised"), error])


def step(x):
    hcb.check(x > 0, "x is {}", x)  # the check
    return x


@jax.jit
def tapped(x):
    return hcb.tap(save, x, name="saver")  # the tap


def test_taps_without_waiting():
    tapped(jnp.float32(1))


def test_after_it():
    pass


def test_a_group():
    jax.jit(lambda x: hcb.tap(collect, x))(jnp.float32(1))


def test_checks_without_waiting():
    jax.jit(step)(jnp.float32(-1))


def test_waits_itself():
    jax.jit(step)(jnp.float32(-2))
    hcb.barrier_wait()


def test_expects_it():
    tapped(jnp.float32(1))
    with pytest.raises(hcb.TapFunctionException):
        hcb.barrier_wait()


def test_fails_anyway():
    tapped(jnp.float32(1))
    assert 1 == 2


@pytest.fixture
def leaving():
    yield
    tapped(jnp.float32(1))


def test_fixture(leaving):
    pass


@pytest.mark.xfail(strict=True)
def test_expected_failure():
    tapped(jnp.float32(1))


def test_captures_what_other_receivers_get(taps):
    with hcb.outfeed_receiver():
        jax.jit(lambda x: hcb.id_print({"a": x, "b": x[:2]}, name="pair"))(jnp.arange(3.0))
    assert taps["pair"][0]["b"].tolist() == [0, 1]
    taps.clear()
    assert len(taps) == 0


def test_lists_names(taps):
    jax.jit(lambda x: hcb.id_print(x, name="loss"))(jnp.float32(1))
    taps.assert_close("loss", [1.0])
    with pytest.raises(AssertionError, match="shape"):
        taps.assert_close("loss", [1.0, 2.0])
    taps["los"]
"""

WITHOUT = """
import sys
def test_one():
    assert not [name for name in sys.modules if name.partition(".")[0] in ("hostcallback", "jax", "jaxlib")]
"""


def line_of(text: str) -> int:
    """The line of the suite that has the text."""
    return 1 + next(number for number, line in enumerate(SUITE.splitlines()) if text in line)


def section(output: str, test: str) -> str:
    """The report of one test."""
    found = re.search(rf"^_+ (?:ERROR at \w+ of )?{test} _+\n(.*?)(?=^(?:_|=){{5}})", output, re.M | re.S)
    assert found, output
    return found[1]


def test_failures_of_taps_and_checks_are_those_of_their_test(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    output = run_pytest(tmp_path, "-v", "test_suite.py")
    results = dict(re.findall(r"^test_suite.py::(\w+) (\w+)", output, re.M))
    assert results == {
        "test_taps_without_waiting": "FAILED",
        "test_after_it": "PASSED",
        "test_a_group": "FAILED",
        "test_checks_without_waiting": "FAILED",
        "test_waits_itself": "FAILED",
        "test_expects_it": "PASSED",
        "test_fails_anyway": "FAILED",
        "test_fixture": "ERROR",
        "test_expected_failure": "XFAIL",
        "test_captures_what_other_receivers_get": "PASSED",
        "test_lists_names": "FAILED",
    }, output
    assert "ERROR at teardown of test_fixture" in output

    tap = section(output, "test_taps_without_waiting")
    assert 'raise OSError("disk full")' in tap
    assert "saver" in tap
    assert f"test_suite.py:{line_of('# the tap')}" in tap

    group = section(output, "test_a_group")
    assert "E       ValueError: never raised" in group
    assert 'raise OSError("disk full")' in group
    assert "FAILED test_suite.py::test_a_group - ValueError: never raised" in output

    check = section(output, "test_checks_without_waiting")
    assert re.search(
        r'^>       hcb.check\(x > 0, "x is \{\}", x\).*\n +~~~~~\nE       CheckError: x is -1', check, re.M
    ), check
    assert f"test_suite.py:{line_of('# the check')}: CheckError" in check
    assert "jax.jit(step)(jnp.float32(-1))" in check
    assert "FAILED test_suite.py::test_checks_without_waiting - CheckError: x is -1" in output
    assert "hostcallback/" not in tap + check
    assert "x is -2" in section(output, "test_waits_itself")
    assert "OSError: disk full" in section(output, "test_fails_anyway")
    assert "those that did are 'loss'. Did you mean 'loss'?" in output


@pytest.mark.slow
def test_suites_without_taps_see_no_difference(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(WITHOUT)
    with_it, without = (
        run_pytest(tmp_path, "-v", "test_plain.py", plugin=plugin) for plugin in (True, False)
    )
    assert "1 passed" in with_it
    body = [re.sub(r"in [\d.]+s|^plugins:.*", "", text, flags=re.M) for text in (with_it, without)]
    assert body[0] == body[1]


@pytest.mark.slow
def test_with_xdist_and_the_document(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "pytest.md").read_text()
    (tmp_path / "test_page.py").write_text(re.findall(r"```python\n(.*?)```", page, re.S)[0])
    (tmp_path / "test_suite.py").write_text(SUITE)
    output = run_pytest(tmp_path, "-n", "1", "test_page.py", "test_suite.py")
    assert "FAILED test_page" not in output
    assert re.search(r"6 failed, 5 passed, 1 xfailed, 1 error", output), output
    assert re.search(r'^>       hcb.check\(x > 0, "x is \{\}", x\)', output, re.M)


ODD = """
import sys
import jax
import jax.numpy as jnp
import pytest
import hostcallback as hcb


def several(value):
    raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])


def members(value):
    raise BaseExceptionGroup("all", [KeyboardInterrupt("one"), SystemExit(2)])


TAPS = [lambda value: pytest.fail("failed"), lambda value: pytest.skip("skipped"), lambda value: sys.exit(3),
        lambda value: pytest.exit("out"), lambda value: pytest.xfail("expected"), several, members]


@pytest.mark.parametrize("tap", TAPS)
def test_of_a_tap(tap):
    jax.jit(lambda x: hcb.id_tap(tap, x))(jnp.float32(1))


def test_after_them():
    pass


def test_lost():
    from hostcallback.receiver.runtime.runtime import runtime
    runtime.default_scope.deferred.add_unknown(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_taps_that_end_or_skip_tests_and_groups_fail_their_test_only(
    tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "test_odd.py").write_text(ODD)
    output = run_pytest(tmp_path, *options, "test_odd.py")
    assert "INTERNALERROR" not in output
    assert re.search(r"8 failed, 1 passed", output), output
    for line in (
        "Failed: failed",
        "Skipped: skipped",
        "SystemExit: 3",
        "ValueError: one",
        "KeyboardInterrupt: one",
    ):
        assert line in output
    assert "UnknownConsumerError: 1 message(s) for consumer ids" in output


def test_values_that_are_trees_or_of_several_shapes_are_compared_leaf_by_leaf() -> None:
    from hostcallback.testing import CapturedTaps  # imports pytest's private names

    def quiet(value: Any) -> None:
        """A tap function."""

    with CapturedTaps() as taps:
        for x in (jnp.arange(2.0), jnp.arange(2.0) + 1):
            jax.jit(lambda x: hcb.tap(quiet, {"a": x, "b": (x[0], x > 5)}, name="tree"))(x)
        for size in (1, 2):
            jax.jit(lambda x: hcb.tap(quiet, x, name="ragged"))(jnp.ones(size))
        each = [{"a": [0, 1], "b": (0, [False, False])}, {"a": [1, 2], "b": (1, [False, False])}]
        taps.assert_close("tree", each)
        taps.assert_close(
            "tree", {"a": np.array([[0, 1], [1, 2]]), "b": (np.arange(2), np.zeros((2, 2), bool))}
        )
        taps.assert_close("ragged", [[1], np.ones(2)])
        with pytest.raises(AssertionError, match=r"message 1 of tap 'tree'\['b'\]\[0\]\n.*Mismatched"):
            taps.assert_close("tree", [each[0], {**each[1], "b": (2, [False, False])}])
        with pytest.raises(AssertionError, match=r"sent 2 message\(s\), expected 1"):
            taps.assert_close("tree", each[:1])
        with pytest.raises(AssertionError, match=r"message 0 of tap 'tree' has the structure .* expected"):
            taps.assert_close("tree", [{"a": [0, 1]}, each[1]])
        with pytest.raises(
            AssertionError, match=r"message 1 of tap 'ragged' has the shape \(2,\), expected \(1,\)"
        ):
            taps.assert_close("ragged", [[1], [1]])
        stacked = {"a": np.array([[0, 1], [1, 2]]), "b": (np.arange(2), np.zeros((2, 2), bool))}
        with pytest.raises(
            AssertionError, match=r"sent 2 message\(s\), expected 2 and 4 along the first axes"
        ):
            taps.assert_close("tree", {**stacked, "b": (np.arange(4), stacked["b"][1])})
        with pytest.raises(AssertionError, match=r"expected a scalar along"):
            taps.assert_close("tree", 3)
        with pytest.raises(
            AssertionError, match=r"message 0 of tap 'tree'\['a'\] is an array, expected dict"
        ):
            taps.assert_close("tree", [{**each[0], "a": {"c": 1}}, each[1]])
        for size in (1, 2):
            jax.jit(lambda x: hcb.tap(quiet, (x, x + 1), name="pair"))(jnp.ones(2) * size)
        taps.assert_close("pair", (np.array([[1, 1], [2, 2]]), np.array([[2, 2], [3, 3]])))
