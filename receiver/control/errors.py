"""The errors of live control.

ControlError             something was asked for that cannot be done
|-- RuleFileError        a control file says what makes no sense
|-- ControlSocketError   a process cannot be reached, or must not be trusted, or cannot be reachable
`-- NoSuchTapError       a glob matches no tap
"""

from __future__ import annotations

from receiver.errors import HostCallbackError


class ControlError(HostCallbackError):
    """Something was asked of live control that cannot be done."""


class RuleFileError(ControlError):
    """A control file cannot be understood; names the line and the cure."""


class ControlSocketError(ControlError):
    """A process's control socket cannot be made, reached or trusted."""


class NoSuchTapError(ControlError):
    """A glob matches no tap of a process."""
