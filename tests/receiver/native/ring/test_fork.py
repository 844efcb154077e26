"""Rings across a fork: the child's are empty and work, and queued messages stay the parent's."""

from __future__ import annotations

import os

import pytest

pytestmark = [
    pytest.mark.native_only,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork"),
]


def test_a_forked_child_has_empty_rings_and_the_parent_keeps_its_own(run_program):
    run_program("fork_program.py")


def test_a_child_of_a_process_whose_program_waits_for_output_waits_for_its_own(run_program):
    run_program("fork_while_waiting.py")


def test_a_child_of_a_process_whose_receivers_take_turns_has_its_own_turn(run_program):
    run_program("fork_in_turn.py")
