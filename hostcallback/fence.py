"""Finds out when all programs that any thread dispatched to a CPU device so far are over.

JAX dispatches without Python, and the results of a program may be gone before it begins. But XLA:CPU gives each program
one of a device's 32 places, from its dispatch to its end. A fence takes places one after the other and gives none back:
once it has all of them at the same time, every program dispatched before is over.

Its first program waits in a native handler, without a thread of XLA, and the others wait for its result. Programs that
are in a fence's way may need a place themselves, for what a tap function or a host function dispatches. So a fence that
gets on no more gives all places back, and begins again.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from receiver import native_library
from receiver.log import logger

TARGET = "hostcallback_hold"
OPERAND_SIZE = 4096
"""Elements of the first program's operand. XLA runs a program of less work on the thread that dispatches it."""

LOOK_SEC = 0.005
"""How often one who waits looks whether the fence gets on."""
PATIENCE_SEC = 0.01
"""After how long without a new place a fence gives all back for the first time; twice as long each further time."""
MOST_PATIENCE_SEC = 1.0
PAUSE_SEC = 0.002
"""How long it then leaves the places to others, at least; a quarter of its patience."""


class NoFenceError(RuntimeError):
    """No fence can be made in this process; the cause says why."""


class _Programs(NamedTuple):
    hold: Callable[[Any], Any]
    follow: Callable[[Any], Any]
    operand: Any


class Fence:
    """Runs fences on a thread of its own, for all who wait: a dispatch that finds no place cannot be interrupted."""

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._changed = threading.Condition()  # protects everything below, but for _taken
        self._devices: set[jax.Device] = set()
        self._waiting = 0
        self._asked = 0
        self._answered = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._taken = 0  # places, over all fences: only the thread writes it

    def start(self) -> None:
        """Starts the thread unless it runs. Any thread.

        Raises:
            NoFenceError: the interpreter ends, and starts none.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hostcallback-fence", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise NoFenceError("no thread can be started") from error
                self._thread = thread

    def wait(
        self, devices: Iterable[jax.Device], look: Callable[[], None], is_busy: Callable[[], bool]
    ) -> None:
        """Waits for what was dispatched to these devices before.

        Args:
            devices: this process's CPU devices.
            look: called now and then; may raise to give up.
            is_busy: whether the host has work that programs may wait for: then a fence in the way is lifted at once.

        Raises:
            NoFenceError: no fence can be made here.
        """
        self.start()
        with self._changed:
            self._devices.update(devices)
            self._asked += 1
            ticket = self._asked
            self._waiting += 1
            self._changed.notify_all()
        try:
            self._wait_for(ticket, look, is_busy)
        finally:
            with self._changed:
                self._waiting -= 1
                nobody_waits = not self._waiting and self._answered < self._asked
            if nobody_waits:
                native_library.load().hcb_hold_end()
        if self._failure is not None:
            raise NoFenceError("a program of the fence could not be run") from self._failure

    def _wait_for(self, ticket: int, look: Callable[[], None], is_busy: Callable[[], bool]) -> None:
        patience = PATIENCE_SEC
        taken, since = self._taken, perf_counter()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._answered >= ticket, LOOK_SEC):
                    return
            look()
            now = perf_counter()
            if self._taken != taken:
                taken, since = self._taken, now
            elif now - since > (PATIENCE_SEC if is_busy() else patience):
                if native_library.load().hcb_hold_end():
                    patience = min(2 * patience, MOST_PATIENCE_SEC)
                since = now

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._answered < self._asked)
                ticket, devices = self._asked, sorted(self._devices, key=lambda device: device.id)
            try:
                for device in devices:
                    self._fence(device)
            except BaseException as error:  # whatever it is, nobody may wait for ever
                logger.exception("a barrier could not find out what runs")
                self._failure = error
            with self._changed:
                self._answered = ticket
                self._changed.notify_all()

    def _fence(self, device: jax.Device) -> None:
        pause = PAUSE_SEC
        while not self._take_all(device):
            with self._changed:
                if not self._waiting:
                    return
            time.sleep(pause)
            pause = min(2 * pause, MOST_PATIENCE_SEC / 4)

    def _take_all(self, device: jax.Device) -> bool:
        """Whether all places of the device were taken before somebody lifted the fence."""
        programs = _programs(device)
        library = native_library.load()
        library.hcb_hold_begin()
        try:
            held = programs.hold(programs.operand)
            self._taken += 1
            for _ in range(compat.PROGRAMS_IN_FLIGHT - 1):
                programs.follow(held)
                self._taken += 1
        finally:
            holds = library.hcb_hold_end()
        return bool(holds)


@functools.cache
def _programs(device: jax.Device) -> _Programs:
    # Compiled beforehand: under whatever settings of the user's they run, they are not traced again.
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(native_library.load().hcb_hold), platform="cpu")
    flag = jax.ShapeDtypeStruct((), np.dtype(np.uint8))

    def hold(x: Any) -> Any:
        return jax.ffi.ffi_call(TARGET, flag, has_side_effect=True)(jnp.sum(x))

    with jax.disable_jit(False):
        operand = jax.device_put(np.zeros(OPERAND_SIZE, np.float32), device)
        held = jax.jit(hold).lower(operand).compile()
        follow = jax.jit(lambda x: x + jnp.uint8(1)).lower(jax.device_put(np.uint8(0), device)).compile()
    return _Programs(held, follow, operand)


def forget() -> None:
    """Forgets compiled programs and a thread: for a forked child, which has neither."""
    global fence
    _programs.cache_clear()
    fence = Fence()


fence = Fence()
"""This process's."""
