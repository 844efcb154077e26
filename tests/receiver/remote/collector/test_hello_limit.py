"""Calls that never send the name of their stream keep no other client out, nor does the limit of open files."""

from __future__ import annotations

import asyncio
import resource

import pytest

from hostcallback.receiver.remote.collector.access import WANTED_FILES, HelloLimiter, Limits, allow_many_files
from threads import run_coroutine


def test_silent_calls_make_room_for_others() -> None:
    async def run() -> None:
        hellos = HelloLimiter(Limits(hello_sec=60, unannounced=3))
        refused = []

        async def silent(number: int) -> None:
            try:
                async with hellos.waiting("ipv4:1.1.1.1:5"):
                    await asyncio.Event().wait()
            except TimeoutError:
                refused.append(number)

        async def good() -> str:
            async with hellos.waiting("ipv4:2.2.2.2:5"):
                await asyncio.sleep(0)
                return "hello"

        tasks = [asyncio.create_task(silent(number)) for number in range(20)]
        assert await good() == "hello"
        await asyncio.sleep(0)
        assert await good() == "hello"
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(refused) >= 17
        assert refused[0] == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not hellos._waiting

    run_coroutine(run())


def test_a_call_that_goes_on_leaves_the_others_of_its_client_counted() -> None:
    async def two_of_another(hellos: HelloLimiter) -> None:
        async with hellos.waiting("ipv4:2.2.2.2:5"), hellos.waiting("ipv4:2.2.2.2:6"):
            for _ in range(50):
                await asyncio.sleep(0)

    async def run() -> None:
        hellos = HelloLimiter(Limits(hello_sec=60, unannounced=2))
        async with hellos.waiting("ipv4:1.1.1.1:5"):
            async with hellos.waiting("ipv4:1.1.1.1:6"):
                pass
            with pytest.raises(TimeoutError):
                await two_of_another(hellos)
        assert not hellos._waiting

    run_coroutine(run())


def test_a_silent_call_ends_without_a_client() -> None:
    async def run() -> None:
        hellos = HelloLimiter(Limits(hello_sec=0.01))
        with pytest.raises(TimeoutError):
            async with hellos.waiting("ipv4:1.1.1.1:5"):
                await asyncio.Event().wait()
        assert not hellos._waiting

    run_coroutine(run())


NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("found", "then"),
    [
        ((256, 4096), (4096, 4096)),
        ((256, 4 * WANTED_FILES), (WANTED_FILES, 4 * WANTED_FILES)),
        ((256, NONE), (WANTED_FILES, NONE)),
        ((4096, 4096), None),
        ((2 * WANTED_FILES, NONE), None),
        ((NONE, NONE), None),
    ],
)
def test_the_limit_is_raised_up_to_what_is_allowed_and_never_lowered(
    found: tuple[int, int], then: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: found)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: made.append(limits))
    allow_many_files()
    assert made == ([] if then is None else [then])
