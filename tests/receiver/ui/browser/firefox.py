"""Drives Firefox by WebDriver BiDi, which it speaks itself: https://w3c.github.io/webdriver-bidi/."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAIT_SEC = 30.0


class Firefox:
    """One tab of a running Firefox.

    Attributes:
        problems: what the page reported as an error, by its console or by an exception.
    """

    def __init__(self, connection: Any) -> None:
        self.problems: list[str] = []
        self._connection = connection
        self._numbers = itertools.count(1)
        self._call("session.new", capabilities={})
        self._tab = self._call("browsingContext.getTree")["contexts"][0]["context"]
        self._call("session.subscribe", events=["log.entryAdded"])

    def open(self, address: str, width: int = 1280, height: int = 800) -> None:
        """Opens an address and waits until it is loaded. Sizes are in CSS pixels."""
        viewport = {"width": width, "height": height}
        self._call("browsingContext.setViewport", context=self._tab, viewport=viewport)
        self._call("browsingContext.navigate", context=self._tab, url=address, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression, promises awaited; an exception in it raises RuntimeError."""
        found = self._call(
            "script.evaluate",
            expression=f"(async () => JSON.stringify(await ({expression})))()",
            target={"context": self._tab},
            awaitPromise=True,
        )
        if found["type"] != "success":
            raise RuntimeError(found["exceptionDetails"]["text"])
        return json.loads(found["result"].get("value", "null"))

    def wait(self, expression: str) -> Any:
        """Evaluates an expression until it is true; returns its value."""
        pause = threading.Event()
        for _ in range(int(WAIT_SEC / 0.1)):
            if found := self.evaluate(expression):
                return found
            pause.wait(0.1)
        raise AssertionError(f"not true within {WAIT_SEC:g} s: {expression}")

    def picture(self, path: Path) -> None:
        """Writes what the tab shows as a PNG file."""
        data = self._call("browsingContext.captureScreenshot", context=self._tab)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._connection.recv(WAIT_SEC))
            if answer.get("method") == "log.entryAdded" and answer["params"]["level"] == "error":
                self.problems.append(answer["params"]["text"])
            if answer.get("id") == number:
                if answer["type"] == "error":
                    raise RuntimeError(f"{method}: {answer['message']}")
                return answer["result"]


@contextlib.contextmanager
def running_firefox(program: str, profile: Path) -> Iterator[Firefox]:
    """Starts Firefox without a window, with a new profile."""
    from websockets.sync.client import connect

    arguments = ["--headless", "--no-remote", "--remote-debugging-port=0", "--profile", str(profile)]
    profile.mkdir()
    said = profile / "stderr.txt"
    with (
        said.open("w") as file,
        subprocess.Popen([program, *arguments, "about:blank"], stderr=file) as process,
    ):
        try:
            with connect(f"{_listening(process, said)}/session", max_size=None, proxy=None) as connection:
                yield Firefox(connection)
        finally:
            process.kill()


def _listening(process: subprocess.Popen[bytes], said: Path) -> str:
    pause = threading.Event()
    for _ in range(int(WAIT_SEC / 0.1)):
        if found := re.search(r"listening on (ws://\S+)", said.read_text()):
            return found[1]
        assert process.poll() is None, said.read_text()
        pause.wait(0.1)
    raise AssertionError(f"Firefox does not listen: {said.read_text()}")
