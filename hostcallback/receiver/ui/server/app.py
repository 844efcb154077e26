"""The paths of the server, see docs/design/ui.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.taplog.diff.comparison import Tolerance
from hostcallback.receiver.ui.index.arrays import array, heatmap
from hostcallback.receiver.ui.index.runs import table
from hostcallback.receiver.ui.index.series import AXES, MAX_POINTS, chart
from hostcallback.receiver.ui.index.times import times
from hostcallback.receiver.ui.server.page_data import MAX_CHARTS, PageData
from hostcallback.receiver.ui.server.requests import (
    MAX_BODY,
    BadRequestError,
    NoControlError,
    UnknownError,
    choice,
    cursor,
    number,
    numbers,
    one_tap,
    parse,
    parse_json,
    text,
    whole,
)
from hostcallback.receiver.ui.texts import SHOWN, TextFilter, Wanted, lines

PAGE = Path(__file__).parent.parent / "page"

MAX_TAPS = 2000
"""Taps that an overview lists if the request names no limit."""

MAX_LINES = 1000
MAX_COLUMNS = 500
MAX_STRIP = 40
MAX_ID = 2**31
MAX_WATCHED = 1024
EVENT_SEC = 0.5
ALIVE_SEC = 10.0
"""Seconds between the comments that keep a stream of events open."""

MAX_STREAMS = 32
"""Streams of events at a time."""


def make_app(data: PageData) -> Starlette:
    """Makes the application, without its protection."""
    streams = _Streams(data)

    def overview(request: Request) -> Any:
        query = request.query_params
        return data.overview(text(query, "filter"), whole(query, "limit", MAX_TAPS, 0, 20_000))

    def series(request: Request) -> Any:
        query = request.query_params
        taps = data.taps(numbers(query, "tap", MAX_CHARTS))
        points, axis = whole(query, "points", 800, 2, MAX_POINTS), choice(query, "axis", AXES)
        low, high = number(query, "from"), number(query, "to")
        return {"series": [chart(data.index, tap, points, low, high, axis) for tap in taps]}

    def texts(request: Request) -> Any:
        query = request.query_params
        chosen = TextFilter(
            text(query, "q"), text(query, "run"), choice(query, "show", SHOWN), text(query, "process"),
            text(query, "device"), text(query, "place"), number(query, "from"), number(query, "to"),
        )  # fmt: skip
        wanted = Wanted(
            chosen, cursor(query, "before"), cursor(query, "after"), whole(query, "limit", 200, 1, MAX_LINES)
        )
        return lines(data.fresh(), wanted)

    def one_array(request: Request) -> Any:
        query = request.query_params
        at, strip = whole(query, "at", -1, -(2**53), 2**53), whole(query, "strip", 0, 0, MAX_STRIP)
        (tap,) = data.taps([one_tap(query)])
        return array(data.index, tap, at, strip)

    def histograms(request: Request) -> Any:
        query = request.query_params
        taps = data.taps(numbers(query, "tap", MAX_CHARTS))
        columns = whole(query, "columns", 200, 1, MAX_COLUMNS)
        return heatmap(data.index, taps, columns, number(query, "from"), number(query, "to"))

    def difference(request: Request) -> Any:
        query = request.query_params
        tolerance = Tolerance(abs(number(query, "rtol") or 0.0), abs(number(query, "atol") or 0.0))
        return data.difference(text(query, "left"), text(query, "right"), tolerance)

    answers: dict[str, Callable[[Request], Any]] = {
        "/api/overview": overview,
        "/api/series": series,
        "/api/texts": texts,
        "/api/array": one_array,
        "/api/heatmap": histograms,
        "/api/diff": difference,
        "/api/times": lambda request: times(data.fresh(), whole(request.query_params, "tap", -1, -1, MAX_ID)),
        "/api/errors": lambda request: data.errors(),
        "/api/runs": lambda request: table(data.fresh()),
        "/api/devices": lambda request: data.devices(),
        "/api/knobs": lambda request: data.knobs(),
    }
    changes: dict[str, Callable[[bytes], Any]] = {
        "/api/rules": lambda body: data.set_rules(parse(body)),
        "/api/knobs": lambda body: data.set_knob(parse_json(body)),
        "/api/stop": lambda body: data.stop(),
    }

    async def change(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return JSONResponse({"error": f"the body is longer than {MAX_BODY} bytes"}, 413)
        made = changes[request.url.path]
        return await run_in_threadpool(_json(lambda request: made(body)), request)

    routes = [
        Route("/", lambda request: FileResponse(PAGE / "index.html")),
        *(Route(path, _json(answer)) for path, answer in answers.items()),
        Route("/api/events", streams.events),
        *(Route(path, change, methods=["POST"]) for path in changes),
        Route("/api/{rest:path}", _json(_no_such_path)),
        Mount("/", StaticFiles(directory=PAGE)),
    ]
    return Starlette(routes=routes)


def _no_such_path(request: Request) -> Any:
    raise UnknownError(f"there is no {request.url.path[:200]!r}: docs/design/ui.md lists the paths")


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    # Starlette runs plain functions in threads.
    def respond(request: Request) -> Response:
        try:
            found = answer(request)
        except UnknownError as error:
            return JSONResponse({"error": str(error)}, 404)
        except BadRequestError as error:
            return JSONResponse({"error": str(error)}, 400)
        except NoControlError as error:
            return JSONResponse({"error": str(error)}, 403)
        except HostCallbackError as error:
            return JSONResponse({"error": str(error)}, 502)
        return JSONResponse(found)

    return respond


class _Streams:
    # Server-sent events: each open page is told what has changed, at most twice a second.

    def __init__(self, data: PageData) -> None:
        self._data = data
        self._open = 0

    async def events(self, request: Request) -> Response:
        try:
            watched = numbers(request.query_params, "watch", MAX_WATCHED)
        except BadRequestError as error:
            return JSONResponse({"error": str(error)}, 400)
        if self._open >= MAX_STREAMS:
            problem = f"{self._open} pages are open, expected at most {MAX_STREAMS}: close some"
            return JSONResponse({"error": problem}, 503)
        return StreamingResponse(self._stream(request, watched), media_type="text/event-stream")

    async def _stream(self, request: Request, watched: list[int]) -> AsyncIterator[str]:
        self._open += 1
        before: dict[str, Any] = {}
        silent = 0.0
        try:
            with self._data.filler.watched():
                yield "retry: 1000\n\n"
                while not self._data.is_ending():  # starlette cancels it when the page is gone
                    found = await asyncio.to_thread(self._data.changes, watched)
                    told, before = changed(before, found), found
                    silent += EVENT_SEC
                    if told:
                        silent = 0.0
                        yield f"event: change\ndata: {json.dumps(told)}\n\n"
                    elif silent >= ALIVE_SEC:
                        silent = 0.0
                        if await request.is_disconnected():  # where the server does not say so by itself
                            return
                        yield ": alive\n\n"
                    await asyncio.sleep(EVENT_SEC)
        finally:
            self._open -= 1


def changed(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Content of an event: everything if something is new, with the changed taps; empty if nothing is."""
    if before == found:
        return {}
    known = {item[0]: item for item in before.get("taps", [])}
    return {
        **found,
        "overview": before.get("overview") != found["overview"],
        "devices": before.get("devices") != found["devices"],
        "taps": [item for item in found["taps"] if known.get(item[0]) != item],
    }
