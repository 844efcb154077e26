"""The errors of live control.

ControlError             a request that cannot be fulfilled
|-- RuleFileError        a rule file with invalid content
|-- ControlSocketError   a process that cannot be reached, must not be trusted, or cannot open its socket
`-- NoSuchTapError       a glob that matches no tap
"""

from __future__ import annotations

from hostcallback.receiver.errors import HostCallbackError


class ControlError(HostCallbackError):
    """A user asked live control for something that it cannot do."""


class RuleFileError(ControlError):
    """The content of a rule file is invalid; the text names the line and the cure.

    Example:
        pathlib.Path("wrong.toml").write_text("[loss]\\nevery = 0\\n")
        try:
            hcb.control_file("wrong.toml")
        except hcb.RuleFileError as error:
            print(error)
    """


class ControlSocketError(ControlError):
    """A process's control socket cannot be created, reached or trusted."""


class NoSuchTapError(ControlError):
    """A glob matches no tap of a process."""
