"""The public names of a package, which its `__init__.pyi` lists for type checkers too; each is loaded when used."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


_LIBRARY = os.path.dirname(os.__file__) + os.sep


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without frames of this package, and without those of Python's library that it ends in."""
    kept: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        file = frame.f_code.co_filename
        ends_in_library = (
            kept is None and file.startswith((_LIBRARY, "<frozen ")) and "site-packages" not in file
        )
        if not _is_own(frame) and not ends_in_library:
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    return kept


def hide_frames(function: F) -> F:
    """Decorates a public function that works without JAX: tracebacks of its exceptions end at the user's line.

    Python ends generators that the user has not run to their end after the modules are gone, and so the blocks in them.
    What the end of a block does was done before that, at exit.
    """
    is_finalizing = sys.is_finalizing  # kept here: the names of this module are gone then

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if is_finalizing():
                return None
            if isinstance(error, TypeError) and error.__traceback__ and error.__traceback__.tb_next is None:
                error.args = (_with_cure(function, str(error)),)  # the function has not begun
            if os.environ.get("JAX_TRACEBACK_FILTERING") != "off":
                error.with_traceback(users_frames(error.__traceback__))
            raise

    return cast(F, call)


def _with_cure(function: Callable[..., Any], error: str) -> str:
    # What Python says of wrong arguments, with the user's line. Python 3.13 and later append a suggestion to it.
    import inspect  # here: for errors only

    text = error.partition(". Did you mean ")[0]
    unexpected = UNEXPECTED.search(text)
    if unexpected:
        parameters = inspect.signature(function).parameters.values()
        options = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
        text += f": {suggestion(unexpected[1], options)}"
    is_of_package = function.__qualname__ == function.__name__
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_own(frame):
        frame = frame.f_back
    line = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
    return f"{'hcb.' if is_of_package else ''}{text}, at {line}"


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "hostcallback"


UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")

_OTHER_NAMES = {"directory": ("dir", "folder", "path")}
"""What an option may be taken for."""


def suggestion(name: str, options: list[str]) -> str:
    """Returns what the user may have meant by an option that does not exist."""
    import difflib

    near = difflib.get_close_matches(name, options, n=1) or [
        option for option in options if name in _OTHER_NAMES.get(option, ())
    ]
    return f"did you mean {near[0]}=?" if near else f"its options are {', '.join(options)}"


class PublicNames:
    """The names of one package: what its `__getattr__` and `__dir__` call. Any thread."""

    def __init__(
        self,
        package: str,
        *,
        unstarred: Sequence[str] = (),
        before: Callable[[str], object] = lambda module: None,
        renamed: Mapping[str, str] = {},
        removed: Mapping[str, str] = {},
    ) -> None:
        """Reads nothing yet.

        Args:
            package: its name.
            unstarred: names that `import *` leaves out.
            before: called with the module of a name before that is imported.
            renamed: old names, which warn, and what they are called now.
            removed: names of earlier versions, and what to do instead.
        """
        self._package = package
        self._unstarred = unstarred
        self._before = before
        self._renamed = renamed
        self._removed = removed

    @functools.cached_property
    def modules(self) -> dict[str, str]:
        """The module of each name."""
        import ast  # like the file, only for the first name
        import pkgutil

        stub = pkgutil.get_data(self._package, "__init__.pyi")
        assert stub is not None, "the package's data was installed without __init__.pyi"
        return {
            alias.name: node.module or ""
            for node in ast.parse(stub).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    @property
    def starred(self) -> list[str]:
        """What `import *` imports, as `__all__`."""
        packages = {name for name, module in self.modules.items() if module == self._package}
        return sorted(self.modules.keys() - packages - set(self._unstarred))

    @hide_frames
    def load(self, name: str) -> Any:
        """The object of a name, for `__getattr__`.

        Raises:
            AttributeError: it is no public name.
        """
        if name == "__all__":
            return self.starred
        new = self._renamed.get(name)
        if new is not None:
            warnings.warn(f"{self._package}.{name} is called {new} now", DeprecationWarning, stacklevel=3)
            return self.load(new)
        module = "" if name.startswith("__") else self.modules.get(name, "")
        if not module:
            cure = f": it was removed; {self._removed[name]}" if name in self._removed else ""
            text = f"module {self._package!r} has no attribute {name!r}{cure}"
            raise AttributeError(text, name=name, obj=sys.modules[self._package])
        if module == self._package:
            return importlib.import_module(f"{module}.{name}")
        # What modules make lives as long as the process: a collection looks at all objects of JAX, and finds nothing.
        collects = gc.isenabled()
        try:
            gc.disable()
            self._before(module)
            value = getattr(importlib.import_module(module), name)
        finally:
            if collects:
                gc.enable()
        setattr(sys.modules[self._package], name, value)
        return value

    def listed(self) -> list[str]:
        """The names that `dir` lists; submodules that happen to be imported are internal and left out."""
        special = [name for name in vars(sys.modules[self._package]) if name.startswith("__")]
        return sorted({*special, *self.modules, "__all__"})
