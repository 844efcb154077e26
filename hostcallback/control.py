"""Control of taps at run time, without compiling anew: `taps["layer*/grad"].disable()`."""

from __future__ import annotations

import difflib
import fnmatch

from receiver.log import logger
from receiver.runtime import runtime


class TapSelection:
    """The taps whose names match a glob, in programs that run already and in those to come. Made by `taps[glob]`."""

    def __init__(self, pattern: str) -> None:
        """See `Taps`."""
        self.pattern = pattern

    def __repr__(self) -> str:
        """The selection and the names it has now."""
        return f"<taps[{self.pattern!r}]: {', '.join(self.names) or 'no tap yet'}>"

    @property
    def names(self) -> list[str]:
        """The names of the taps that match and that a program in this process has, sorted."""
        return [name for name in _names() if fnmatch.fnmatchcase(name, self.pattern)]

    def disable(self) -> list[str]:
        """Switches the taps off: they send nothing, and their functions are not called.

        Looked at where the message would be emitted, so a tap that is off costs its program what an empty foreign call
        does. Applies to messages emitted from now on, from any thread; those that are queued are delivered. Later calls
        win over earlier ones where patterns overlap. Checks are switched off as well (and `enable_checks` does not
        switch them on again). Calls (`call`) and taps of exported programs stay.

        Returns:
            The names that match now. If there are none, that is logged with names that look alike.
        """
        return self._switch(off=True)

    def enable(self) -> list[str]:
        """Switches the taps on again. See `disable`."""
        return self._switch(off=False)

    def _switch(self, *, off: bool) -> list[str]:
        runtime.switches.set_matching(runtime.registry, self.pattern, off=off)
        names = self.names
        if not names:
            known = _names()
            near = difflib.get_close_matches(self.pattern, known, n=3) or known[:3]
            others = f"; there are {', '.join(map(repr, near))}" if near else ""
            logger.warning("no tap is called %r so far%s: it applies to taps to come", self.pattern, others)
        return names


class Taps:
    """The taps of this process by name; `hostcallback.taps` is the one there is.

        hcb.taps["layer*/grad"].disable()

    Names are those given with `name=`, else those of the tap functions.
    """

    def __getitem__(self, pattern: str) -> TapSelection:
        """The taps whose names match a glob (`*`, `?`, `[seq]`, as in `fnmatch`, case counts).

        Raises:
            TypeError: the pattern is no text.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"taps are selected by name, got {pattern!r}: as in hcb.taps['loss*']")
        return TapSelection(pattern)

    def __repr__(self) -> str:
        """The names."""
        return f"<taps: {', '.join(_names()) or 'none yet'}>"

    @property
    def names(self) -> list[str]:
        """The names of the taps that a program in this process has, sorted."""
        return _names()


def _names() -> list[str]:
    return sorted({consumer.name for consumer in runtime.registry.consumers() if consumer.is_switchable})


taps = Taps()
