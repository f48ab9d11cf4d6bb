"""The HTTP side of ``quiesce view``: the page, its data, and the way to Prometheus and Alertmanager.

Rule: nothing but GET (and HEAD); only for names of this machine in the header ``Host``, so that no website can
reach it by a name of its own that leads here; only listed paths are passed on, and only to the two programs that
were started; a file is served only if its name is in a list that was made before. Handlers suspend while a thread
named ``quiesce-view`` does what blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from quiesce.auditor.journal import read_violations
from quiesce.errors import ExtraMissingError
from quiesce.view.runbooks import INDEX, find_runbooks, render_runbook
from quiesce.view.traces import NotRecordedError, find_trace

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from quiesce.view.backend import Backend

__all__ = ["HOSTS", "PAGE", "PROXIED", "make_app"]

PAGE: Final = Path(__file__).with_name("page")
"""Where the page's files are."""

HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names that a browser may have used; any port, so that a forwarded one works."""

PROXIED: Final = re.compile(
    r"query|query_range|query_exemplars|series|labels|label/[a-zA-Z_][a-zA-Z0-9_]*/values|rules|alerts|targets"
)
"""Paths below ``/api/v1/`` of Prometheus that are passed on."""

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "font-src 'self' data:; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Of every answer. Styles may stand in elements, which plotly needs; scripts may not."""

ASK_SECONDS: Final = 60.0
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")
_PLOTLY: Final = "plotly.min.js"
_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}
_T = TypeVar("_T")


def make_app(backend: Backend, page: Path = PAGE) -> Starlette:
    """Return the application.

    Args:
        backend: What answers.
        page: The folder of the page's files.

    Raises:
        ExtraMissingError: If plotly is not installed.
    """
    handlers = _Handlers(backend, page)
    routes = [
        Route("/", handlers.index),
        Route("/page/{name:path}", handlers.asset),
        Route("/api/info", handlers.info),
        Route("/api/dashboards", handlers.dashboards),
        Route("/api/dashboards/{uid}", handlers.dashboard),
        Route("/api/prometheus/query_exemplars", handlers.exemplars),
        Route("/api/prometheus/{path:path}", handlers.prometheus),
        Route("/api/alerts", handlers.alerts),
        Route("/api/trace/{trace_id}", handlers.trace),
        Route("/api/violations", handlers.violations),
        Route("/runbooks", handlers.runbook),
        Route("/runbooks/", handlers.runbook),
        Route("/runbooks/{name}", handlers.runbook),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_Guard)])


class _Guard:
    """Refuses what is not a plain read by a browser of this machine, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message.get("headers", [])}
                message["headers"] = [
                    *message.get("headers", []),
                    *(
                        (name.lower().encode(), value.encode())
                        for name, value in HEADERS.items()
                        if name.lower().encode() not in given
                    ),
                    *([] if b"cache-control" in given else [(b"cache-control", b"no-store")]),
                ]
            await send(message)

        refused = _refusal(scope)
        await (self._app if refused is None else refused)(scope, receive, sending)


def _refusal(scope: Scope) -> Response | None:
    if scope["method"] not in {"GET", "HEAD"}:
        return PlainTextResponse("only GET is answered here\n", 405, {"Allow": "GET, HEAD"})
    given = {name: value for name, value in scope["headers"] if name.startswith(b"sec-fetch-")}
    if (
        given.get(b"sec-fetch-site") in {b"cross-site", b"same-site"}
        and given.get(b"sec-fetch-mode") != b"navigate"
    ):
        return PlainTextResponse("other sites are not answered here\n", 403)
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or re.sub(r":\d*$", "", hosts[0]).lower() not in HOSTS:
        return PlainTextResponse("only names of this machine are answered here\n", 421)
    return None


class _Handlers:
    """Answers requests.

    Args:
        backend: What answers.
        page: The folder of the page's files.
    """

    def __init__(self, backend: Backend, page: Path) -> None:
        self._backend = backend
        self._page = page
        self._files = _files(page)
        self._runbooks = find_runbooks()

    async def _off(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._backend.pool, call)

    # --------------------------------------------------------------------------------------------- the page

    async def index(self, request: Request) -> Response:
        return self._file("index.html", request)

    async def asset(self, request: Request) -> Response:
        return self._file(request.path_params["name"], request)

    def _file(self, name: str, request: Request) -> Response:
        if name not in self._files:
            self._files = _files(self._page)
        path = self._files.get(name)
        if path is None or not path.is_file():
            return PlainTextResponse(f"there is no {name!r}\n", 404)
        answer = FileResponse(
            path,
            media_type=_MEDIA.get(path.suffix, "application/octet-stream"),
            headers={"Cache-Control": "no-cache"},  # it asks each time, so an upgrade is seen at once
            stat_result=path.stat(),
        )
        if request.headers.get("if-none-match") == answer.headers["etag"]:
            return Response(
                status_code=304, headers={"Cache-Control": "no-cache", "ETag": answer.headers["etag"]}
            )
        return answer

    # ------------------------------------------------------------------------------------------- what is told

    async def info(self, request: Request) -> Response:
        return JSONResponse(self._backend.info())

    async def dashboards(self, request: Request) -> Response:
        listed = []
        for uid, text in self._backend.content.dashboards.items():
            told = json.loads(text)
            listed.append(
                {
                    "uid": uid,
                    "title": told.get("title", uid),
                    "description": told.get("description", ""),
                    "tags": told.get("tags", []),
                }
            )
        return JSONResponse(listed)

    async def dashboard(self, request: Request) -> Response:
        text = self._backend.content.dashboards.get(request.path_params["uid"])
        if text is None:
            return _not_found("there is no dashboard of that uid")
        return Response(text, media_type="application/json")

    async def violations(self, request: Request) -> Response:
        return JSONResponse(await self._off(self._violations))

    def _violations(self) -> list[dict[str, Any]]:
        found = []
        for shown in self._backend.runs:
            with contextlib.suppress(OSError):
                for record in read_violations(shown.folder):
                    alert = self._backend.content.alert_of(record.invariant)
                    where = {"run": shown.name or None, "folder": str(shown.folder)}
                    about = {"alert": alert, "runbook": f"/runbooks/{alert}"}
                    found.append({**record.to_json(), **where, **about})
        return sorted(found, key=lambda told: (not told.get("open"), -float(told.get("last_unix") or 0.0)))

    async def trace(self, request: Request) -> Response:
        trace_id = request.path_params["trace_id"]
        if not _TRACE_ID.fullmatch(trace_id):
            return _not_found("a trace is named by 32 hexadecimal digits")
        folders = [shown.folder for shown in self._backend.runs if shown.recorded]
        try:
            return JSONResponse(await self._off(lambda: find_trace(folders, trace_id)))
        except NotRecordedError as error:
            return _not_found(str(error))

    async def runbook(self, request: Request) -> Response:
        name = request.path_params.get("name", INDEX).removesuffix(".html")
        content = self._backend.content
        text = await self._off(lambda: render_runbook(name, self._runbooks, content.documentation))
        if text is None:
            return PlainTextResponse(f"there is no runbook {name!r}\n", 404)
        return Response(text, media_type="text/html; charset=utf-8")

    # ---------------------------------------------------------------------------------------- what is passed on

    async def prometheus(self, request: Request) -> Response:
        path = request.path_params["path"]
        if not PROXIED.fullmatch(path):
            return _not_found("this path of Prometheus is not passed on")
        return await self._prometheus(path, _query(request))

    async def _prometheus(self, path: str, query: str) -> Response:
        if not query.isascii():
            return JSONResponse(
                {"status": "error", "errorType": "bad_data", "error": "not a query string"}, 400
            )
        url, error = self._backend.prometheus_url, self._backend.prometheus_error
        if url is None or error:
            return _unavailable(error or "Prometheus does not answer")
        return await self._pass_on("Prometheus", url, f"/api/v1/{path}", query)

    async def alerts(self, request: Request) -> Response:
        url, error = self._backend.alertmanager_url, self._backend.alertmanager_error
        if url is None:
            return _unavailable(error)
        return await self._pass_on("Alertmanager", url, "/api/v2/alerts", "")

    async def exemplars(self, request: Request) -> Response:
        """Pass on, and add what Prometheus cannot have: those of the recording."""
        answer = await self._prometheus("query_exemplars", _query(request))
        given = parse_qs(_query(request))
        try:
            query = given["query"][0]
            begin, end = (float(given[name][0]) for name in ("start", "end"))
        except (KeyError, ValueError):
            return answer
        if answer.status_code != http.HTTPStatus.OK:
            return answer
        more = await self._off(lambda: self._backend.exemplars(query, begin, end))
        if not more:
            return answer
        told = json.loads(bytes(answer.body))
        told["data"] = [*(told.get("data") or []), *more]
        return JSONResponse(told)

    async def _pass_on(self, name: str, url: str, path: str, query: str) -> Response:
        try:
            status, media, content = await self._off(lambda: _ask(url, path, query))
        except (OSError, http.client.HTTPException) as error:
            return _unavailable(f"{name} does not answer: {str(error) or type(error).__name__}")
        return Response(content, status, media_type=media)


def _query(request: Request) -> str:
    query: bytes = request.scope["query_string"]
    return query.decode("latin-1")


def _ask(url: str, path: str, query: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ASK_SECONDS)
    try:
        connection.request("GET", f"{path}?{query}" if query else path)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", "application/json"), answer.read()
    finally:
        connection.close()


def _unavailable(error: str) -> Response:
    return JSONResponse({"status": "error", "errorType": "unavailable", "error": error}, 502)


def _not_found(error: str) -> Response:
    return JSONResponse({"status": "error", "errorType": "not_found", "error": error}, 404)


def _files(page: Path) -> dict[str, Path]:
    """List the files that are served, by the name in their address."""
    found = {
        path.relative_to(page).as_posix(): path
        for path in sorted(page.rglob("*"))
        if path.is_file() and path.suffix in _MEDIA
    }
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise ExtraMissingError("quiesce view", "plotly", "view")
    return {**found, _PLOTLY: Path(spec.origin).parent / "package_data" / _PLOTLY}
