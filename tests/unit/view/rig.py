"""Recordings written by hand, and an application that is called without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.types import Message

__all__ = ["Answer", "Sampled", "ask", "span", "write_recording"]

Sampled = Sequence[tuple[float, Mapping[str, float | None]]]
"""Unix time, and what changed."""


def write_recording(
    folder: Path,
    *,
    run: str = "mine",
    role: str = "controller",
    writer: str = "w1",
    number: int = 0,
    samples: Sampled = (),
    spans: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write files of a recording, as a recorder does; return the run's folder."""
    telemetry = folder / "telemetry"
    telemetry.mkdir(parents=True, exist_ok=True)
    begun = [at for at, _ in samples] + [one["b"] / 1e9 for one in spans]
    header = {
        "format": "quiesce-recorder",
        "version": 1,
        "run": run,
        "role": role,
        "incarnation": number + 1,
        "writer": writer,
        "pid": 1,
        "sequence": 0,
        "unix_ns": round(min(begun) * 1e9),
    }
    lines: dict[str, list[Mapping[str, Any]]] = {
        "samples": [{"u": at, "m": dict(values)} for at, values in samples],
        "spans": [one for one in spans if one["n"] != "quiesce.slot"],
        "slots": [one for one in spans if one["n"] == "quiesce.slot"],
    }
    for stream, told in lines.items():
        if told:
            text = "".join(
                json.dumps(line, separators=(",", ":")) + "\n"
                for line in ({**header, "stream": stream}, *told)
            )
            (telemetry / f"{stream}-{number:04d}.jsonl").write_text(text, encoding="utf-8")
    return folder


def span(
    name: str, begin: float, seconds: float, *, trace: str = "a" * 32, ident: str = "b" * 16, **about: object
) -> dict[str, Any]:
    """Return the line of a span; attributes have ``_`` for the dot after ``quiesce``."""
    return {
        "n": name,
        "t": trace,
        "s": ident,
        "p": "",
        "b": round(begin * 1e9),
        "e": round((begin + seconds) * 1e9),
        "a": {f"quiesce.{key}": value for key, value in about.items()},
        "l": [["c" * 32, "d" * 16]],
        "v": [["seen", round(begin * 1e9), {"n": 1}]],
        "st": "ok",
        "c": False,
    }


class Answer(NamedTuple):
    """What an application answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - what JSON can say
        """Return the body's JSON."""
        return json.loads(self.body)


def ask(
    app: Starlette,
    path: str,
    *,
    method: str = "GET",
    host: str = "127.0.0.1:9470",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Ask an application, as a server would."""
    raw, _, query = path.partition("?")
    given = {"host": host, **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": raw,
        "raw_path": raw.encode(),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items() if value],
        "server": ("127.0.0.1", 9470),
        "client": ("127.0.0.1", 1),
    }
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nothing more comes")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    start = next(message for message in sent if message["type"] == "http.response.start")
    return Answer(
        start["status"],
        {name.decode().lower(): value.decode() for name, value in start["headers"]},
        b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body"),
    )
