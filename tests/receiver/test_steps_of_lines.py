"""The steps of the failures of one line: those of an earlier and a later report together."""

from __future__ import annotations

from hostcallback.receiver.failures import steps
from hostcallback.receiver.failures.steps import FailedSteps, Occurrence


def at(seq: int, step: int | None = None) -> Occurrence:
    return Occurrence("cpu:0", seq, 10**18 + seq, 1, step)


def of(*failures: Occurrence, **options: int) -> FailedSteps:
    found = FailedSteps(**options)  # type: ignore[arg-type]
    for failure in failures:
        found.note(failure)
    return found


def test_two_reports_of_a_line_count_as_one() -> None:
    earlier, later = of(at(1, 5), at(2)), of(at(3, 5), at(4, 7), at(5))
    later.note(at(6, 9), count=4)
    assert later.set_steps({at(5): 8}, [])
    earlier.merge(later)
    assert earlier.counts == {5: 2, 7: 1, 8: 1, 9: 1}
    assert (earlier.unsent, earlier.folded, earlier.is_in_log) == (2, 3, True)
    assert earlier.unknown == {at(2)}
    assert earlier.without([], 9) == 4


def test_of_many_steps_the_earlier_ones_are_kept() -> None:
    earlier = of(at(1, 5), at(2, 6), max_steps=3)
    earlier.merge(of(at(3, 7), at(4, 6), at(5, 8)))
    assert earlier.counts == {5: 1, 6: 2, 7: 1}
    assert earlier.known([at(1, 5), at(5, 8)]) == [5, 6, 7, 8]


def test_of_many_failures_without_a_step_the_first_are_looked_for() -> None:
    most = steps.MAX_UNKNOWN
    earlier = of(*(at(seq) for seq in range(most - 2)))
    later = of(*(at(seq) for seq in reversed(range(most, 2 * most - 1))))
    earlier.merge(later)
    assert sorted(failure.seq for failure in earlier.unknown) == [*range(most - 2), most, most + 1]
    assert earlier.unsent == most - 2 + most - 1
