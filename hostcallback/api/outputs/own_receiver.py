"""Base of sinks that open a receiver for themselves when they are entered."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Self, cast

from hostcallback.api.receiver import OutfeedReceiver, outfeed_receiver
from hostcallback.receiver.errors import DeviceClaimedError


class OwnReceiver:
    """A sink that is a context manager: a receiver for all devices delivers to it.

    Attributes:
        receiver_name: the name of that receiver.
        hint_if_claimed: what to do where another receiver is open.
    """

    receiver_name: ClassVar[str]
    hint_if_claimed: ClassVar[str]
    _receiver: OutfeedReceiver | None = None

    def __enter__(self) -> Self:
        """Opens a receiver for all devices, which delivers to this sink.

        Raises:
            DeviceClaimedError: another receiver is open: give it this sink.
        """
        self._receiver = outfeed_receiver(
            receiver_name=self.receiver_name, sinks=[cast("Callable[..., Any]", self)]
        )
        try:
            self._receiver.__enter__()
        except DeviceClaimedError as error:
            self._receiver = None
            error.add_note(self.hint_if_claimed)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Waits for all messages of the block. Raises the exceptions of tap functions, as a receiver does."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.__exit__(kind, error, tb)
