"""Calls that never send the name of their stream keep no other client out."""

from __future__ import annotations

import asyncio

import pytest

from hostcallback.receiver.remote.collector.access import HelloLimiter, Limits
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
