"""Receivers and failed checks have HTML for notebooks, in which foreign text is only text."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback.receiver.text import preformatted


def test_receivers_and_failed_checks_are_shown_with_their_texts_escaped() -> None:
    with hcb.outfeed_receiver(receiver_name="<b>mine</b>") as receiver:
        jax.jit(lambda x: hcb.check(x > 0, "<script>x</script> is {}", x))(jnp.float32(-1))
        try:
            hcb.barrier_wait()
        except* hcb.CheckError as group:
            error = group.exceptions[0]
    assert isinstance(error, hcb.CheckError)
    assert error._repr_html_() == error.check._repr_html_()
    shown = error.check._repr_html_()
    assert "&lt;script&gt;x&lt;/script&gt; is -1.0" in shown
    assert "<script>" not in shown
    assert repr(receiver) == receiver.summary()
    html = receiver._repr_html_()
    assert "&lt;b&gt;mine" in html
    assert "<b>" not in html
    assert "cpu:0" in html


def test_control_characters_have_no_effect() -> None:
    assert preformatted("a\x1b[31m\nb&") == '<pre style="font-family: monospace">a\\x1b[31m\nb&amp;</pre>'


def test_taps_are_a_table_with_their_state_and_rules() -> None:
    try:
        hcb.taps["<b>html/*"].every(3)
        hcb.taps["<b>html/b"].disable()
        program = jax.jit(lambda x: (hcb.id_print(x, name="<b>html/a"), hcb.id_print(x, name="<b>html/b")))
        program(1)
        hcb.barrier_wait()
        shown = hcb.taps["<b>html/*"]._repr_html_()
        assert "<td>&lt;b&gt;html/a</td>" in shown
        assert "<td>on</td><td>every=3</td><td>0</td>" in shown
        assert "<td>off</td><td>every=3</td><td>1</td>" in shown
        assert "test_html.py:" in shown
        assert "<b>" not in shown + hcb.taps._repr_html_()
    finally:
        hcb.taps["<b>html/*"].reset()


# treescope asks for a class that numpy 2.5 deprecates.
@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")
@pytest.mark.parametrize("installed", [True, False])
def test_captured_data_and_statistics_are_tables(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    if installed:
        pytest.importorskip("treescope", reason="arrays are shown by treescope; pip install treescope")
    else:
        monkeypatch.setitem(sys.modules, "treescope", None)
    captured = hcb.capture()
    with hcb.outfeed_receiver(sinks=[captured]) as receiver:
        for step in range(12):
            hcb.id_tap(lambda *_: None, {"step": jnp.int32(step), "<i>": jnp.arange(3.0)}, name="<b>")
    shown = captured._repr_html_()
    assert "<td>&lt;b&gt;</td><td>tap</td>" in shown
    assert "<b>" not in shown
    tap = captured["<b>"]._repr_html_()
    assert "<th>step</th>" in tap
    assert "<td>9</td>" in tap
    assert "<td>10</td>" not in tap
    assert ("treescope" in tap) is installed
    assert "array([[0., 1., 2.]," in tap or installed
    stats = receiver.stats
    assert stats == list(stats)
    assert "<th>messages</th>" in stats._repr_html_()  # type: ignore[attr-defined]
    assert "<td>cpu:0</td><td>12</td>" in next(row for row in stats if row.delivered)._repr_html_()
