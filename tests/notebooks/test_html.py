"""Receivers and failed checks have HTML for notebooks, in which foreign text is only text."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import hostcallback as hcb
from hostcallback.receiver.html import preformatted


def test_receivers_and_failed_checks_are_shown_with_their_texts_escaped() -> None:
    with hcb.outfeed_receiver(receiver_name="<b>mine</b>") as receiver:
        jax.jit(lambda x: hcb.check(x > 0, "<script>x</script> is {}", x))(jnp.float32(-1))
        try:
            hcb.barrier_wait()
        except* hcb.CheckError as group:
            error = group.exceptions[0]
    assert isinstance(error, hcb.CheckError)
    shown = error.check._repr_html_()
    assert "&lt;script&gt;x&lt;/script&gt; is -1.0" in shown
    assert "<script>" not in shown
    assert repr(receiver) == receiver.summary()
    html = receiver._repr_html_()
    assert "&lt;b&gt;mine" in html
    assert "<b>" not in html
    assert "cpu:0" in html


def test_control_characters_have_no_effect() -> None:
    assert preformatted("a\x1b[31m\nb&") == "<pre>a\\x1b[31m\nb&amp;</pre>"
