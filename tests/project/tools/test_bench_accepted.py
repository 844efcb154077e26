"""The ratio of a benchmark's row, and the guard: rows that became worse by more than their spreads are named."""

from __future__ import annotations

from pathlib import Path

from tools.bench import accepted
from tools.bench.row import Row, measure


def row(name: str, ours: float, peer: str = "peer", spread: float = 0.02, peer_figure: float = 1.0) -> Row:
    return Row(name, "us", ours, peer_figure, peer, 1.0, spread)


def rows_of_a_machine(speed: float, *, limited: float) -> list[Row]:
    """Ten rows whose peers and ours take `speed` us, and one with a limit of 1 us, which takes `limited`."""
    rows = [row(f"row {k}", speed, peer_figure=speed) for k in range(10)]
    return [*rows, row("limited", limited, "the limit")]


def test_rows_that_became_worse_by_more_than_their_spreads_are_named(tmp_path: Path) -> None:
    before = [
        row("tap", 1.0),
        row("the same", 2.0, "copy"),
        row("call", 1.0, spread=0.3),
        row("gone", 1.0),
        row("busy 24% of the time", 1.0),
    ]
    accepted.save(before, tmp_path / "accepted.json")
    kept = accepted.load(tmp_path / "accepted.json")
    now = [
        row("tap", 1.03),
        row("the same", 2.2, "copy"),
        row("call", 1.3),
        row("added", 1.0),
        row("busy 28% of the time", 1.0),
    ]
    worse, new = accepted.changes(now, kept, whole=True)
    assert worse == ["WORSE: tap | copy: 2.00 -> 2.20 (spreads ±2% and ±2%)", "MISSING: gone | peer"]
    assert new == ["new: added | peer: 1.00"]
    assert accepted.changes(now[2:3], kept, whole=False) == ([], [])


def test_a_time_with_a_limit_may_be_as_much_longer_as_the_peers_of_a_slower_machine(tmp_path: Path) -> None:
    accepted.save(rows_of_a_machine(1.0, limited=0.5), tmp_path / "accepted.json")
    kept = accepted.load(tmp_path / "accepted.json")

    def worse(speed: float, limited: float, *more: Row) -> int:
        return len(accepted.changes([*rows_of_a_machine(speed, limited=limited), *more], kept, whole=True)[0])

    told = accepted.changes(rows_of_a_machine(2.0, limited=1.0), kept, whole=True)[1]
    assert told == ["this machine takes 2.00 times as long for the peers' work; so may times with a limit"]
    assert [worse(2.0, 1.0), worse(2.0, 1.1), worse(1.0, 1.0), worse(1.1, 0.55), worse(0.5, 0.5)] == [
        0,
        1,
        1,
        1,
        0,
    ]
    rows = rows_of_a_machine(2.0, limited=1.0)
    assert len(accepted.changes([*rows[:7], rows[-1]], kept, whole=False)[0]) == 1  # too few peers to know


def test_what_is_no_time_may_not_grow_on_a_slower_machine(tmp_path: Path) -> None:
    memory = Row("memory", "MiB", 100.0, 200.0, "the limit", 1.0, 0.02)
    accepted.save([*rows_of_a_machine(1.0, limited=0.5), memory], tmp_path / "accepted.json")
    kept = accepted.load(tmp_path / "accepted.json")
    more = Row("memory", "MiB", 110.0, 200.0, "the limit", 1.0, 0.02)
    assert len(accepted.changes([*rows_of_a_machine(2.0, limited=0.5), more], kept, whole=True)[0]) == 1


def test_runs_on_other_machines_do_not_make_the_guard_weaker(tmp_path: Path) -> None:
    path = tmp_path / "accepted.json"

    def save(speed: float, limited: float, *, rebase: bool = False) -> tuple[float, float | None]:
        accepted.save(rows_of_a_machine(speed, limited=limited), path, rebase=rebase)
        kept = accepted.load(path)
        return kept["limited | the limit"].ratio, kept["row 3 | peer"].peer

    assert save(1.0, 0.5) == (0.5, 1.0)
    assert save(2.0, 1.0) == (0.5, 1.0)
    assert save(2.0, 1.4) == (0.7, 1.0)  # worse, and accepted: in the first machine's terms
    assert save(2.0, 0.6) == (0.6, 1.0)  # better, at least by this
    assert save(0.5, 0.4) == (0.6, 1.0)  # on a fast machine no better
    assert save(0.5, 0.2) == (0.4, 1.0)
    assert save(1.0, 0.41) == (0.41, 1.0)  # the same machine
    assert save(2.0, 0.8, rebase=True) == (0.8, 2.0)


def test_without_accepted_figures_all_rows_are_new(tmp_path: Path) -> None:
    assert accepted.changes([row("tap", 1.0)], accepted.load(tmp_path / "none.json"), whole=True)[0] == []


def test_the_ratio_is_that_of_rounds_so_that_a_slower_machine_does_not_change_it() -> None:
    speeds = iter([1.0, 1.0, 1.0, 7.0, 9.0, 8.0])  # of the warm-up round, then of five
    speed = 1.0

    def ours() -> float:
        nonlocal speed
        speed = next(speeds)
        return 2.0 * speed

    mine, peer = measure([ours, lambda: 1.6 * speed], rounds=5)
    compared = mine.versus(peer, "tap", "us", "peer", 1.3)
    assert compared.ratio == 1.25
    assert compared.spread == 0
    assert compared.ours == 14.0
    assert compared.reached


def test_a_side_that_did_not_take_turns_is_compared_by_medians() -> None:
    (mine,) = measure([iter([2.0, 2.0, 3.0, 4.0]).__next__], rounds=3)
    (peer,) = measure([iter([9.0, 1.0, 1.5, 1.0]).__next__], rounds=3)
    assert mine.versus(peer, "tap", "us", "peer", None).ratio == 3.0  # of rounds it would be 2


def test_a_difference_that_was_negative_in_a_round_is_compared_by_medians() -> None:
    sides = [iter([2.0, 2.0, 3.0, 4.0]).__next__, iter([9.0, 1.0, 1.5, -8.0]).__next__]
    mine, peer = measure(sides, rounds=3)
    assert mine.versus(peer, "tap", "ns", "peer", None).ratio == 3.0
