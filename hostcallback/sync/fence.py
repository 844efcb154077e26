"""Finds out when all programs that any thread dispatched to a CPU device so far are over.

JAX dispatches without Python, and the results of a program may be gone before it begins. But XLA:CPU gives each program
one of a device's 32 places, from its dispatch to its end. A fence takes places one after the other and gives none back:
once it has all of them at the same time, every program dispatched before is over.

Its first program waits in a native handler, and the others wait for its result; when it goes on, all need threads of
XLA to end. Programs in a fence's way may wait for the host, which may need a place or a thread itself: for what a tap
function dispatches, say. So a fence begins only where XLA has a thread to spare and no program waits for the host, and
one that gets no further gives all back, leaves the device to others for a while, and begins again.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.receiver import fork
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.sync import hold
from hostcallback.sync.dispatch_thread import DispatchError, dispatch_thread

LOOK_SEC = 0.005
"""How often one who waits looks whether the fence gets on."""
PATIENCE_SEC = 0.02
"""After how long without a new place a fence gives all back."""
SHORT_SEC = 2.0
"""For how long that is so; behind it the patience doubles with each try, up to `MOST_PATIENCE_SEC`."""
MOST_PATIENCE_SEC = 1.0
PAUSE_SEC = 0.002
"""How long it then leaves the places to others; twice as long each further time, up to `MOST_PAUSE_SEC`."""
MOST_PAUSE_SEC = 0.25
GIVE_UP_SEC = 60.0
"""For how long a fence is tried on a device that others keep busy; time in which programs wait for the host is free."""


class Fence:
    """Fences for all who wait, made on the dispatch thread."""

    def __init__(self) -> None:
        """Nobody waits yet."""
        # Protects everything below, but for _taken and _patience_sec; and the beginning of a hold.
        self._changed = threading.Condition()
        self._devices: set[jax.Device] = set()  # of those who asked since the last answer
        self._waiting = 0
        self._asked = 0
        self._answered = 0
        self._failure: BaseException | None = None
        self._taken = 0  # places, over all fences: only the thread writes it, and the next
        self._patience_sec = PATIENCE_SEC
        self._given_up = 0  # how many fences

    def wait(self, devices: Iterable[jax.Device], look: Callable[[], None]) -> bool:
        """Waits for what was dispatched to these devices before.

        On a device that other threads keep busy without an end it gives up after `GIVE_UP_SEC`, and logs that once.
        Returns whether it did not have to.

        Args:
            devices: this process's CPU devices.
            look: called now and then; may raise to give up.

        Raises:
            DispatchError: no fence can be made here.
            NoThreadError: the interpreter ends.
        """
        with self._changed:
            self._devices.update(devices)
            self._asked += 1
            ticket, given_up = self._asked, self._given_up
            self._waiting += 1
        try:
            dispatch_thread.submit(self._answer)
            self._wait_for(ticket, look)
        finally:
            with self._changed:
                self._waiting -= 1
                failure, self._failure = self._failure, None
                if not self._waiting:  # `_take_all` begins no hold from now on
                    hold.end()
        if failure is not None:
            raise DispatchError("a program of the fence could not be run") from failure
        return given_up == self._given_up

    def _wait_for(self, ticket: int, look: Callable[[], None]) -> None:
        taken, since = self._taken, perf_counter()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._answered >= ticket, LOOK_SEC):
                    return
            look()
            now = perf_counter()
            if self._taken != taken:
                taken, since = self._taken, now
            if now - since > self._patience_sec or runtime.holds_programs():
                hold.end()
                since = now

    def _answer(self) -> None:
        with self._changed:
            if self._answered == self._asked:
                return
            ticket, devices = self._asked, sorted(self._devices, key=lambda device: device.id)
            self._devices.clear()
        failure: BaseException | None = None
        try:
            for device in devices:
                self._fence(device)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            failure = error
        with self._changed:
            self._answered = ticket
            self._failure = failure
            self._changed.notify_all()

    def _fence(self, device: jax.Device) -> None:
        tried_sec, pause, without_place = 0.0, PAUSE_SEC, 0
        self._patience_sec = PATIENCE_SEC
        while self._waiting:
            if runtime.holds_programs():
                time.sleep(PAUSE_SEC)
                continue
            begun, taken = perf_counter(), self._taken
            if self._has_thread_to_spare(device):
                if self._take_all(device):
                    return
                # A device that runs its programs where they are dispatched holds the first of them there.
                without_place = without_place + 1 if self._taken == taken else 0
                if without_place > 1 and not runtime.holds_programs():
                    return  # and then a program is over when its dispatch is
            time.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SEC)
            tried_sec += perf_counter() - begun
            if tried_sec > SHORT_SEC:
                self._patience_sec = min(2 * self._patience_sec, MOST_PATIENCE_SEC)
            if tried_sec > GIVE_UP_SEC:
                self._tell(device)
                return

    def _has_thread_to_spare(self, device: jax.Device) -> bool:
        # Else XLA may have none to end the fence's programs with, and they would stay in the way.
        probe = hold.held_program(device)()
        begun = perf_counter()
        while not probe.is_ready():
            if perf_counter() - begun > LOOK_SEC:
                while self._waiting and not probe.is_ready():
                    time.sleep(PAUSE_SEC)
                return False
            time.sleep(20e-6)
        return True

    def _take_all(self, device: jax.Device) -> bool:
        """Whether all places of the device were taken before somebody lifted the fence."""
        dispatch_held, follow = hold.held_program(device), _follower(device)
        with self._changed:
            if not self._waiting:
                return False
            hold.begin()
        try:
            held = dispatch_held()
            if not held.is_ready():
                self._taken += 1
            for _ in range(compat.PROGRAMS_IN_FLIGHT - 1):
                if held.is_ready():  # lifted
                    return False
                follow(held)
                self._taken += 1
        finally:
            holds = hold.end()
        return holds

    def _tell(self, device: jax.Device) -> None:
        self._given_up += 1
        if self._given_up == 1:
            logger.warning(
                "a barrier waited %s s for other threads, which keep %s:%s busy: taps may still come of what they "
                "dispatched before and dropped the results of. Have them keep a result, or wait in those threads",
                GIVE_UP_SEC,
                device.platform,
                device.id,
            )


@functools.cache
def _follower(device: jax.Device) -> Callable[[Any], Any]:
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        return jax.jit(lambda x: x + np.uint8(1)).lower(jax.device_put(np.uint8(0), device)).compile()


def forget() -> None:
    """Forgets compiled programs and who waited: for a forked child."""
    global fence
    _follower.cache_clear()
    fence = Fence()


fence = Fence()
"""This process's."""


fork.in_child(fork.Stage.PROGRAM, forget)
