"""Launches of programs by their short names, and by their numbers."""

from __future__ import annotations

import pytest

from hostcallback.receiver.messages import launch_bits, launch_name


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        (0x12C2DB94, "c2db94"),
        (-0x3D246C, "c2db94"),
        (7, "000007"),
        (1 << 24, "000000"),
        (-1, "ffffff"),
        (0, ""),
    ],
)
def test_a_name_is_the_last_six_digits_and_an_unknown_launch_has_none(run_id: int, name: str) -> None:
    assert launch_name(run_id) == name
    if name:
        bits, value = launch_bits(name)
        assert run_id & bits == value


def test_a_number_of_other_than_six_digits_is_the_whole_run_id() -> None:
    for text in ("7", "12345", "1234567", "-3", "-123456", "9" * 19, "-" + "9" * 19):
        assert launch_bits(text) == (-1, int(text))
    assert launch_bits("123456") == (0xFFFFFF, 0x123456)
    assert launch_bits("C2DB94") == launch_bits("c2db94") == (0xFFFFFF, 0xC2DB94)


@pytest.mark.parametrize("text", ["", "-", "c2db9", "c2db94a", "g2db94", "+7", "9" * 20, "7\n", " 7", "1.5"])
def test_what_is_no_launch_is_refused_as_it_was_given(text: str) -> None:
    with pytest.raises(ValueError, match="expected a launch as reports show it, such as c2db94") as caught:
        launch_bits(text)
    assert str(caught.value).startswith(f"got {text!r}, ")
