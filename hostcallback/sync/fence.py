"""Fences, which find out when all programs that any thread has dispatched to a CPU device so far have ended.

JAX dispatches without Python, and the results of a program may be dropped before it begins. But XLA:CPU gives each
program one of a device's 32 slots, from its dispatch to its end. A fence takes slots one after the other and keeps
them. Once it has all of them at the same time, all earlier programs have ended.

The first program of a fence waits in a native handler, and the others wait for its result; when it goes on, all of them
need threads of XLA to end. The programs that a fence waits for may wait for the host, which may need a slot or a
thread, for example for a dispatch in a tap function. So a fence begins only if XLA has a free thread and no program
waits for the host. A fence that makes no progress gives all slots back, pauses, and begins again. `inflight` decides
whether a fence is needed.
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
from hostcallback.receiver import processes
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.sync import threads

LOOK_SEC = 0.005
"""Seconds between the checks of a waiting thread for progress of the fence."""
PATIENCE_SEC = 0.02
"""Seconds without a new slot after which a fence gives all slots back."""
SHORT_SEC = 2.0
"""Seconds of tries after which the patience doubles with each try, up to `MAX_PATIENCE_SEC`."""
MAX_PATIENCE_SEC = 1.0
PAUSE_SEC = 0.002
"""Seconds for which it then leaves the slots to others; doubled with each try, up to `MAX_PAUSE_SEC`."""
MAX_PAUSE_SEC = 0.25
GIVE_UP_SEC = 60.0
"""Seconds for which a fence is tried on a busy device, without the time in which programs wait for the host."""


class Fence:
    """Makes fences on the dispatch thread, for all waiting threads."""

    def __init__(self) -> None:
        """Starts without waiting threads."""
        # Protects everything below except `_taken` and `_patience_sec`; also the beginning of a hold.
        self._changed = threading.Condition()
        self._devices: set[jax.Device] = set()  # devices requested since the last answer
        self._waiting = 0
        self._asked = 0
        self._answered = 0
        # The tickets of the last answer that failed, and its error: each thread that holds one of them raises it.
        self._failed: tuple[range, BaseException | None] = range(0), None
        self._taken = 0  # slots taken by all fences; only the dispatch thread writes this and `_patience_sec`
        self._patience_sec = PATIENCE_SEC
        self._given_up = 0  # number of fences that were given up

    def wait(self, devices: Iterable[jax.Device], look: Callable[[], None]) -> bool:
        """Waits for all programs dispatched to these devices before this call.

        If other threads keep a device busy without end, it gives up after `GIVE_UP_SEC` and logs that once. Returns
        False if it gave up.

        Args:
            devices: CPU devices of this process.
            look: called repeatedly while waiting; may raise to stop the wait.

        Raises:
            DispatchError: no fence can be made here.
            NoThreadError: the interpreter is shutting down.
        """
        with self._changed:
            self._devices.update(devices)
            self._asked += 1
            ticket, given_up = self._asked, self._given_up
            self._waiting += 1
        try:
            threads.dispatch_thread.submit(self._answer)
            self._wait_for(ticket, look)
        finally:
            with self._changed:
                self._waiting -= 1
                failed, failure = self._failed
                if not self._waiting:  # `_take_all` begins no hold from now on
                    threads.end()
                    self._failed = range(0), None
        if failure is not None and ticket in failed:
            raise threads.DispatchError("a program of the fence could not be run") from failure
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
                threads.end()
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
        except BaseException as error:  # handed to the waiting threads, which must get an answer in any case
            failure = error
        with self._changed:
            if failure is not None:
                self._failed = range(self._answered + 1, ticket + 1), failure
            self._answered = ticket
            self._changed.notify_all()

    def _fence(self, device: jax.Device) -> None:
        tried_sec, pause = 0.0, PAUSE_SEC
        self._patience_sec = PATIENCE_SEC
        # Without the lock: a thread that leaves is seen at the next try, and its absence only ends the work
        # earlier.
        while self._waiting:
            if runtime.holds_programs():
                time.sleep(PAUSE_SEC)
                continue
            begun = perf_counter()
            if self._has_thread_to_spare(device) and self._take_all(device):
                return
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SEC)
            tried_sec += perf_counter() - begun
            if tried_sec > SHORT_SEC:
                self._patience_sec = min(2 * self._patience_sec, MAX_PATIENCE_SEC)
            if tried_sec > GIVE_UP_SEC:
                self._tell(device)
                return

    def _has_thread_to_spare(self, device: jax.Device) -> bool:
        # Without a free thread XLA might not be able to end the fence's programs, which would keep their slots.
        probe = threads.held_program(device)()
        begun = perf_counter()
        while not probe.is_ready():
            if perf_counter() - begun > LOOK_SEC:
                while self._waiting and not probe.is_ready():
                    time.sleep(PAUSE_SEC)
                return False
            time.sleep(20e-6)
        return True

    def _take_all(self, device: jax.Device) -> bool:
        """Returns whether all earlier programs have ended.

        They have if it took all slots of the device before another thread lifted the fence, or if the device runs
        programs on the dispatching thread: there a program has ended when its dispatch returns.
        """
        dispatch_held, follow = threads.held_program(device), _follower(device)
        with self._changed:
            if not self._waiting:
                return False
            threads.begin()
        has_all = False
        try:
            held = dispatch_held()
            if not held.is_ready():
                self._taken += 1
            for _ in range(compat.PROGRAMS_IN_FLIGHT - 1):
                if held.is_ready():  # another thread has lifted the fence
                    break
                follow(held)
                self._taken += 1
            else:
                has_all = True
        # In any case, because held programs keep slots that other threads' programs wait for.
        finally:
            found = threads.end()
        return found.blocked_beginner or (has_all and found.on)

    def _tell(self, device: jax.Device) -> None:
        self._given_up += 1
        if self._given_up == 1:
            logger.warning(
                "a barrier waited %s s for other threads, which keep %s:%s busy: messages of their programs whose "
                "results they dropped may still come. Keep a result in those threads, or wait in them",
                GIVE_UP_SEC,
                device.platform,
                device.id,
            )


@functools.cache
def _follower(device: jax.Device) -> Callable[[Any], Any]:
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        return jax.jit(threads.barrier_copy).lower(jax.device_put(np.uint8(0), device)).compile()


def forget() -> None:
    """Drops compiled programs and waiting threads, for a forked child."""
    global fence
    _follower.cache_clear()
    fence = Fence()


fence = Fence()
"""The fences of this process."""


processes.in_child(processes.Stage.PROGRAM, forget)
