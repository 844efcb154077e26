"""X-ray: programs get taps where JAX lowers them, as long as a context is open. Functions are never called or traced.

An open context is part of the key of every jit's cache (`jax.make_user_context`), so the programs that are called in it
are traced once more and kept apart from the plain ones. Within a trace, where nothing is lowered, an X-ray marks the
equations by a named scope, which JAX carries through grad and vmap, and the program around them is rewritten where
it is lowered.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import jax
from jax.sharding import Sharding

from hostcallback import _jax_compat as compat
from hostcallback.lowering.equations import equations_in
from hostcallback.primitives import effects
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.device_receiver import at_start
from hostcallback.receiver.runtime.dispatch.scope import never_entered, tell_never_entered
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.tracing import source_line
from hostcallback.tracing.arguments import refuse_compiled, refuse_generators

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_key_lock = threading.Lock()  # protects that there is one key


class _Key(NamedTuple):
    """The `jax.make_user_context` of the X-rays of the open contexts, outermost first; what sets it for a thread."""

    context: Any
    set_local: Callable[[Any], None]
    unset_local: Callable[[], None]


_only_key: _Key | None = None


def _key() -> _Key:
    """Creates the key when the first block opens. Programs that were traced before are traced once more after that."""
    global _only_key
    with _key_lock:
        if _only_key is None:
            context = jax.make_user_context(default_value=())
            key = _Key(context, *compat.user_context_setters(context))
            # Else programs of tap functions would count as those of blocks for all threads, whose taps they lack.
            at_start(lambda: key.set_local(()))
            _only_key = key
        return _only_key


SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
"""Settings of JAX on which the code of a program depends; a thread may have its own."""


@dataclass(frozen=True)
class Program:
    """A program that is about to be lowered.

    Attributes:
        closed: the program as it is without X-ray: a closed jaxpr without constants.
        tapped: the same with the taps of the X-rays that came before.
        name: of its module, such as `jit(step)`.
        donated: for each input, whether the program may take its memory.
        shardings: for each input, its sharding; None where the compiler decides.
        devices: the number of devices that it is for.
        constants: the values of its first inputs.
        paths: for each input, its path in the user's arguments, such as `("params", "w")`; empty for a constant.
        mark: the scope of the equations that are meant; "" for all.
        settings: the settings of JAX with which it is lowered, in the order of `SETTINGS`.
    """

    closed: compat.ClosedJaxpr
    tapped: compat.ClosedJaxpr
    name: str
    donated: tuple[bool, ...]
    shardings: tuple[Sharding | None, ...]
    devices: int
    constants: tuple[Any, ...]
    paths: tuple[tuple[str, ...], ...]
    mark: str = ""
    settings: tuple[Any, ...] = field(
        default_factory=lambda: tuple(getattr(jax.config, name) for name in SETTINGS)
    )

    @property
    def function(self) -> str:
        """The name of the jitted function."""
        return self.name.removeprefix("jit(").removeprefix("pmap(").removesuffix(")")

    def run(self, function: Callable[..., list[Any]]) -> compat.ClosedJaxpr:
        """Traces `function(*values)` of the program's constants and inputs, which returns the program's results.

        Returns:
            The value for `tapped` of the next X-ray: a closed jaxpr with the inputs and results of the program.
        """
        with jax.disable_jit(False), compat.without_constant_folding():
            traced: compat.ClosedJaxpr = compat.lower_to_primitives(
                jax.make_jaxpr(function)(*self.closed.in_avals)
            )
            return traced

    def without_values(self) -> Program:
        """The program without what need not live as long as it: the values of constants, and the taps."""
        return replace(self, tapped=self.closed, constants=(None,) * len(self.constants))

    @contextlib.contextmanager
    def own_work(self, device: object = None) -> Iterator[None]:
        """A block for programs of our own about this one: with its settings, on a device, without taps.

        Other settings that the user has made for programs of their own do not hold.
        """
        x64, precision, threefry = self.settings
        with (
            closed(),
            jax.disable_jit(False),
            jax.transfer_guard("allow"),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.check_tracer_leaks(False),
            jax.enable_x64(x64),
            jax.default_matmul_precision(precision),
            jax.threefry_partitionable(threefry),
            jax.default_device(device) if isinstance(device, jax.Device) else contextlib.nullcontext(),
        ):
            yield


class Xray(ABC):
    """What is done to programs. Hashable: programs with equal ones are equal. Any thread.

    Attributes:
        order: X-rays of a lower order are applied first.
        made_by: the public function that makes it.
    """

    order: ClassVar[int] = 0
    made_by: ClassVar[str] = ""

    @abstractmethod
    def rewrite(self, program: Program, context: Context) -> compat.ClosedJaxpr | None:
        """Returns `program.run(...)` with taps; None if there is nothing to tap in this program.

        Raises:
            UserError: the user has to know.
        """

    def passed_over(self, closed: compat.ClosedJaxpr) -> None:
        """Called with a program of this package that is lowered in a context, as taps outside of jit have."""
        return

    def left(self, context: Context, function: str | None) -> None:
        """Called when a context is left without an exception, or a call in it has returned. Does nothing here.

        Args:
            context: what was left.
            function: the name of the function that was called; None for a `with` block.
        """
        return


class UserError(ValueError):
    """Raised where a program is lowered, through the user's call of it."""


class Context:
    """`with` block in which each program gets the taps of an X-ray; may be entered again, and by several threads.

    It is also a decorator, of a function that is then called in such a block.

    Attributes:
        xray: what is done to the programs.
        seen: number of programs that were lowered in it.
    """

    def __init__(self, xray: Xray, *, all_threads: bool = False) -> None:
        """Opens nothing yet; `all_threads` says whether programs that other threads call are meant too.

        Raises:
            RuntimeError: this JAX lowers its programs in another way.
        """
        if effects.why_not:
            raise RuntimeError(effects.why_not)
        self.xray = _intern(xray)
        self.seen = 0
        self.notes: dict[str, Any] = {}  # of the X-ray
        self._all_threads = all_threads
        self._unused = object()
        never_entered[self._unused] = xray.made_by.removeprefix("hcb."), str(source_line.user_source_line())

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Logs that nothing was called in the block: it was neither entered nor put around a function."""
        if not _is_finalizing():  # kept here: the names of the module may be gone by then
            tell_never_entered([getattr(self, "_unused", None)])

    @source_line.hide_frames
    def __enter__(self) -> Context:
        if compat.is_staging():
            raise RuntimeError(
                f"a block of {self.xray.made_by} is for programs that are called in it, and here a function is being "
                "traced: put the block around the call of the jitted function, or wrap a function in here, as in "
                f"{self.xray.made_by}(f, ...)(x)"
            )
        self._open()
        return self

    def _open(self) -> bool:
        never_entered.pop(self._unused, None)
        serves = runtime.serves(threading.current_thread())
        if self._all_threads:
            with _everywhere_lock:
                _everywhere.append(self)
                _set_key_everywhere()
        else:
            _here.contexts.append(self)
            if serves:
                _here.within.append(self)
        _set_key_here(serves)
        return serves

    @source_line.hide_frames
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self.xray.left(self, None)

    def close(self) -> None:
        """Leaves the block without running its end (`Xray.left`).

        Raises:
            RuntimeError: it is not open, or another thread has opened it.
        """
        self._close(runtime.serves(threading.current_thread()))

    def _close(self, serves: bool) -> None:
        if self._all_threads:
            with _everywhere_lock:
                self._take_from(_everywhere)
                _set_key_everywhere()
        else:
            self._take_from(_here.contexts)
            if self in _here.within:
                _here.within.remove(self)
        _set_key_here(serves)

    def _take_from(self, opened: list[Context]) -> None:
        if opened and opened[-1] is self:
            opened.pop()
            return
        numbers = [number for number, each in enumerate(opened) if each is self]
        if not numbers:
            raise RuntimeError(
                f"a block of {self.xray.made_by} was left that is not open on this thread: leave it "
                "once for each time that it was entered, on the thread that entered it (all_threads=True makes one "
                "that any thread may leave)"
            )
        del opened[numbers[-1]]

    @source_line.hide_frames
    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: returns `function`, called in the context.

        Raises:
            TypeError: it is no function, or was compiled ahead of time.
        """
        what = self.xray.made_by
        if not callable(function):
            raise TypeError(
                f"what {what} returned is a `with` block or a decorator of a function, got "
                f"{type(function).__name__} {function!r:.80}: step = {what}(step), at "
                f"{source_line.user_source_line()}"
            )
        refuse_compiled(what.removeprefix("hcb."), function)
        return self.wrap(function)

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """Returns a function that calls `function` in the context.

        Raises:
            TypeError: its body runs after the call.
        """
        never_entered.pop(self._unused, None)
        refuse_generators(self.xray.made_by, function)
        name = str(getattr(function, "__name__", "the function"))
        mark = source_line.mark(next(_numbers))

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if compat.is_staging():
                _note_mark(mark, self)
                with jax.named_scope(mark):
                    return function(*args, **kwargs)
            seen = self.seen
            serves = self._open()
            try:
                result = function(*args, **kwargs)
            finally:
                self._close(serves)
            if self.seen != seen:
                self.xray.left(self, name)
            return result

        return called


class _Here(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Context] = []
        # Those of them that a tap function, or the host function of a call, has opened.
        self.within: list[Context] = []
        self.is_closed = False


_here = _Here()
_everywhere_lock = threading.Lock()  # protects `_everywhere`
_everywhere: list[Context] = []
_numbers = itertools.count()
_interned: weakref.WeakKeyDictionary[Xray, weakref.ref[Xray]] = weakref.WeakKeyDictionary()
"""Of equal X-rays one, which the caches of jits keep alive: programs of an earlier context are used again."""
_intern_lock = threading.Lock()  # protects it


def _intern(xray: Xray) -> Xray:
    with _intern_lock:
        found = _interned.get(xray, lambda: None)()
        if found is None:
            _interned[xray] = weakref.ref(xray)
        return found or xray


MAX_MARKS = 1 << 16
_marks_lock = threading.Lock()  # protects `_marked`
_marked: dict[str, Context] = {}
"""By mark, the contexts that marked equations last: a wrapper may be gone before the program around it is lowered."""


def _set_key_everywhere() -> None:
    compat.set_user_context(_key().context, tuple(context.xray for context in _everywhere))


def _set_key_here(serves: bool) -> None:
    # From what is open, in whichever order blocks are left. A thread that has opened none sees the key of all threads,
    # unless it serves: it runs tap functions, or the host function of a call, see `tapped`.
    contexts = _here.contexts
    if serves or contexts:
        opened = _here.within if serves else [*_everywhere, *contexts]
        _key().set_local(tuple([context.xray for context in opened]))
    else:
        _key().unset_local()


def _note_mark(mark: str, context: Context) -> None:
    with _marks_lock:
        _marked.pop(mark, None)
        _marked[mark] = context  # as the last one
        while len(_marked) > MAX_MARKS:
            del _marked[next(iter(_marked))]


def open_contexts() -> tuple[Context, ...]:
    """The contexts that are open for the calling thread, outermost first."""
    return (*_everywhere, *_here.contexts)


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Hides all open contexts from the calling thread, while it traces programs of our own."""
    contexts, _here.contexts = _here.contexts, []
    was_closed, _here.is_closed = _here.is_closed, True
    try:
        # Without a key there is nothing to close, and it is not made for that.
        with contextlib.nullcontext() if _only_key is None else _only_key.context(()):
            yield
    finally:
        _here.contexts, _here.is_closed = contexts, was_closed


def _apart() -> AbstractContextManager[object]:
    xrays = tuple(context.xray for context in _here.within)
    return contextlib.nullcontext() if _only_key is None else _only_key.context(xrays)


def tapped(
    closed: compat.ClosedJaxpr,
    name: str,
    donated: Sequence[bool],
    shardings: Sequence[Sharding | None],
    devices: int,
) -> compat.ClosedJaxpr | None:
    """Returns the program with the taps of the contexts that are open, of its constants and inputs; None for no taps.

    See `hostcallback.primitives.effects.rewrite` for the arguments.
    """
    if _here.is_closed:
        return None
    # What a tap function runs is no part of the blocks around the program that has the tap: its own taps would run it
    # again. It is part of the blocks that the tap function itself opens.
    opened = _here.within if runtime.serves(threading.current_thread()) else open_contexts()
    # By the key, because a context for all threads may have been opened since the program was traced.
    contexts = [(context, "") for context in opened if context.xray in _key().context.value]
    if _marked:
        marks = _marks_in(closed)
        with _marks_lock:
            found = {mark: _marked.get(mark) for mark in marks}
        contexts += [(context, mark) for mark, context in found.items() if context is not None]
        if None in found.values():
            logger.warning(
                "%s has a function that was wrapped by hcb.observe, hcb.watch_nonfinite or hcb.capsule where it was "
                "traced, and %d wrappers were made since then, so that this one is forgotten: wrap the function once, "
                "outside of what is traced", name, MAX_MARKS,
            )  # fmt: skip
    contexts = _once(contexts)
    if not contexts:
        return None
    if _is_ours(closed):
        for context, _ in contexts:
            context.xray.passed_over(closed)
        return None
    inner, constants = compat.constants_to_inputs(closed)
    first = len(constants)
    program = Program(
        inner, inner, name, (*[False] * first, *donated), (*[None] * first, *shardings), devices, tuple(constants),
        (*[()] * first, *compat.input_paths(closed)),
    )  # fmt: skip
    for context, mark in sorted(contexts, key=lambda pair: pair[0].xray.order):
        context.seen += not mark
        try:
            new = context.xray.rewrite(replace(program, mark=mark), context)
        except UserError as error:
            raise ValueError(*error.args) from None
        except Exception:  # the program is the user's: it runs without taps
            logger.warning(
                "%s could not look into the program %s, which runs as it is; please report this",
                type(context.xray).__name__.lower(), name, exc_info=True,
            )  # fmt: skip
            continue
        if new is not None:
            program = replace(program, tapped=new)
    return None if program.tapped is inner else program.tapped


def _once(contexts: list[tuple[Context, str]]) -> list[tuple[Context, str]]:
    # Of equal X-rays the first that is for the whole program, or else each one for its part.
    whole = {context.xray: (context, mark) for context, mark in reversed(contexts) if not mark}
    return [*reversed(whole.values()), *(pair for pair in contexts if pair[1] and pair[0].xray not in whole)]


def _is_ours(closed: compat.ClosedJaxpr) -> bool:
    # Barriers and taps outside of jit run programs of this package, but a loop with a bar runs the user's function.
    source = compat.traced_function(closed) or ""
    loops = "primitives/paced_loops.py", "api/loops/progress.py"
    return _PACKAGE in source and not any(f"{_PACKAGE}{file}" in source for file in loops)


def _marks_in(closed: compat.ClosedJaxpr) -> Sequence[str]:
    stacks = dict.fromkeys(str(equation.source_info.name_stack) for equation, _ in equations_in(closed))
    return list(dict.fromkeys(mark for stack in stacks for mark in source_line.marks_in(stack)))


def tell_unseen(closed: compat.ClosedJaxpr, name: str) -> None:
    """Logs that wrappers do nothing in a program that is exported, which stays as it is."""
    if _here.is_closed or not _marked:
        return
    try:
        marks = _marks_in(closed)
    except Exception:  # the program is the user's: it is exported all the same
        return logger.warning(
            "%s is exported, and could not be looked into; please report this", name, exc_info=True
        )
    with _marks_lock:
        found = [_marked.get(mark) for mark in marks]
    for made_by in dict.fromkeys(context.xray.made_by for context in found if context is not None):
        logger.warning(
            "%s is exported, and the %s in it does nothing there: exported programs have the taps and checks in their "
            "code only (hcb.tap, hcb.check)", name, made_by,
        )  # fmt: skip


effects.add_taps = tapped
effects.look_at_exported = tell_unseen
effects.apart = _apart
