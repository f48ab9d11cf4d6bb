"""One call of ``quiesce view``: serves the page until it is told to stop, and cleans up.

Rule: SIGINT, SIGTERM and SIGHUP end it cleanly, with exit code 0, within a second or two; a second one ends it at
once. A port that was named is used or refused; otherwise the usual one, or any free one if that is taken. ``serve`` blocks
for as long as the page is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import uvicorn

from quiesce.errors import ConfigError
from quiesce.view.app import make_app
from quiesce.view.backend import Backend, Content, ViewSettings
from quiesce.view.programs import Programs

__all__ = ["DEFAULT_PORT", "LEAVE_SECONDS", "listen", "serve", "wait_for_run"]

DEFAULT_PORT: Final = 9470
"""Where the page is, if nobody names a port and that one is free."""

LEAVE_SECONDS: Final = 1
"""How long answers that are still being sent may take at the end."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_SECONDS: Final = 0.5


def listen(port: int | None) -> socket.socket:
    """Return a listening socket on loopback.

    Args:
        port: The port; 0 takes any free one, None the usual one or else any free one.

    Raises:
        ConfigError: If the named port cannot be used.
    """
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(("127.0.0.1", candidate))
            made.listen()  # who is told the address may come before the server does
        except (OSError, OverflowError) as error:
            made.close()
            if port is not None:
                raise ConfigError(
                    "--port", f"{port} cannot be used ({error}); name another one, or 0"
                ) from error
        else:
            return made
    raise ConfigError("--port", "no port is free")


def serve(
    folders: list[Path],
    programs: Programs,
    content: Content,
    made: socket.socket,
    *,
    open_browser: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    interval_seconds: float = 1.0,
    watch: Path | None = None,
    data: Path | None = None,
) -> None:
    """Serve the page until a signal.

    Args:
        folders: The run folders.
        programs: What to start.
        content: Dashboards and rules.
        made: What :func:`listen` returned.
        open_browser: Whether to open a browser once the page is served.
        tell: Gets lines for the user.
        interval_seconds: How often runs are scraped.
        watch: A folder of runs; one that starts there later is shown too.
        data: Where to write.

    Raises:
        ViewError: If a folder is no run's, or is shown already.
        ExtraMissingError: If a package is missing.
    """
    with made:
        address = f"http://127.0.0.1:{made.getsockname()[1]}"
        settings = ViewSettings(address, interval_seconds, watch, data)
        asyncio.run(_serve(folders, programs, content, made, settings, open_browser=open_browser, tell=tell))


def wait_for_run(find: Callable[[], Path | None]) -> Path:
    """Return the first run that there is.

    Args:
        find: Returns it, or None.
    """
    while (found := find()) is None:
        time.sleep(_LOOK_SECONDS)
    return found


class _Server(uvicorn.Server):
    """Leaves signals to us: what was started has to end, too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    folders: list[Path],
    programs: Programs,
    content: Content,
    made: socket.socket,
    settings: ViewSettings,
    *,
    open_browser: bool,
    tell: Callable[[str], None],
) -> None:
    backend = Backend(folders, programs, content, settings)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def leave() -> None:
        if over.is_set():
            os._exit(1)  # what was started ends with us
        over.set()

    # `nohup quiesce view` outlives its terminal.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    heeded = [sign for sign in _SIGNALS if sign not in ignored]
    for sign in heeded:
        loop.add_signal_handler(sign, leave)
    try:
        app = make_app(backend)
        config = uvicorn.Config(
            app,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=LEAVE_SECONDS,
        )
        server = _Server(config)
        serving = loop.create_task(server.serve(sockets=[made]))
        await backend.begin()
        for shown in backend.runs:
            tell(f"showing {shown.folder}")
        tell(f"open {settings.address}/ (Ctrl-C ends it)")
        if open_browser:
            backend.pool.submit(webbrowser.open, f"{settings.address}/")
        leaving = loop.create_task(over.wait())
        await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        leaving.cancel()
        await asyncio.gather(serving, backend.stop())
    finally:
        for sign in heeded:
            loop.remove_signal_handler(sign)
