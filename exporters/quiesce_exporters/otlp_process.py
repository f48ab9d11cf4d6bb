"""The process that encodes and sends spans, and the parent's end of the pipe to it.

Rule: one batch at a time, each answered by one line: ``ok`` and how many spans the collector rejected, or why it took
none, ``retry`` or ``never`` before it; a parent that ends closes the pipe, and the process ends with
it, also in the middle of a request: whoever waits for the end of the run's output must not wait for a collector. A
child that the parent forks lets go of the pipe, so it cannot keep the process alive. The process is started as a program
of its own, not forked, so it inherits neither threads nor locks nor the training's memory, and it ignores Ctrl-C: the
parent ends it. Blocks; the parent's end belongs to one thread.

A message is a length of 8 bytes (little-endian), then a marshalled list of parts: a list of spans, each a tuple of plain
values, or the columns of slots' spans. The first message is a marshalled dictionary with the configuration.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from quiesce.errors import TelemetryError
from quiesce_exporters.otlp_config import Endpoint, OtlpConfig
from quiesce_exporters.otlp_spans import PlainSpan, plain_parts
from quiesce_exporters.otlp_transport import OtlpSendError

if TYPE_CHECKING:
    from quiesce.telemetry.finished import FinishedSpan
    from quiesce_exporters.otlp import OtlpWriter

__all__ = ["ExportProcess", "ProcessLostError", "main"]

_SIZE: Final = 8
_LONGEST: Final = 1 << 30
_TAKEN: Final = "ok"
GRACE_SECONDS: Final = 2.0
"""How much longer than a request's timeout an answer may take before the process is given up."""

LAST_SECONDS: Final = 0.2
"""How long a request that is being sent when the parent ends may still take."""


class ProcessLostError(TelemetryError):
    """Raised when the exporting process ended or hangs; what it was sending may or may not have arrived."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the exporting process is lost: {problem}")


class ExportProcess:
    """The parent's end.

    Args:
        config: Where spans go.
        resource: What the parent is, as OpenTelemetry resource attributes.
        version: The instrumentation scope's version.
        started: Since when the parent runs, in Unix seconds.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(
        self, config: OtlpConfig, resource: Mapping[str, str], *, version: str, started: float
    ) -> None:
        if config.traces is None:
            message = "there is no endpoint for spans"
            raise OSError(message)
        self._url = config.traces.url
        self._patience = config.traces.timeout_seconds + GRACE_SECONDS
        # The child's import path is the parent's: what is installed here is what is found there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for name in [name for name in environment if name.startswith("QUIESCE_")]:
            del environment[name]  # the child is no run
        self._child = subprocess.Popen(
            [sys.executable, "-m", "quiesce_exporters.otlp_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a buffer has a lock, which a forked child would inherit
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
        self.pid = self._child.pid
        endpoint = config.traces
        self._greeting = {
            "endpoint": {
                "url": endpoint.url,
                "protocol": endpoint.protocol,
                "headers": dict(endpoint.headers),
                "timeout_seconds": endpoint.timeout_seconds,
                "gzip": endpoint.gzip,
                "certificate": None if endpoint.certificate is None else str(endpoint.certificate),
            },
            "resource": dict(resource),
            "version": version,
            "started": started,
        }
        self._greeted = False
        _PROCESSES.add(self)

    def spans(self, batch: Sequence[FinishedSpan]) -> int:
        """Have a batch exported.

        Returns:
            How many of its spans the collector says it rejected.

        Raises:
            OtlpSendError: If the collector did not take it.
            ProcessLostError: If the process ended, or does not answer.
        """
        try:
            if not self._greeted:
                self._write(self._greeting)
                self._greeted = True
            self._write_spans(batch)
            answer = self._answer()
        except (BrokenPipeError, ValueError) as error:
            raise ProcessLostError(f"it ended with code {self._child.poll()}") from error
        kind, _, problem = answer.decode(errors="replace").partition(" ")
        if kind == _TAKEN:
            return int(problem)
        raise OtlpSendError(self._url, problem, retryable=kind == "retry")

    def close(self, deadline_seconds: float) -> None:
        """Close the pipe, wait for the process for a while, then end it."""
        _PROCESSES.discard(self)
        with contextlib.suppress(OSError):
            self._pipe(self._child.stdin).close()
        try:
            self._child.wait(max(deadline_seconds, 0.0))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        with contextlib.suppress(OSError):
            self._pipe(self._child.stdout).close()

    def forget(self) -> None:
        """In a forked child: let go of the pipe, whose other end is the parent's process."""
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                self._pipe(pipe).close()
        self._child.returncode = 0  # it is not this process's child: nobody here waits for it

    def _write_spans(self, batch: Sequence[FinishedSpan]) -> None:
        """Write a batch; while ``marshal`` works nobody else has the interpreter, so nothing is done twice."""
        parts = plain_parts(batch)
        try:
            data = marshal.dumps(parts)
        except ValueError:  # a mapping that is no dictionary, a value of a class of its own
            data = marshal.dumps(
                _exact([part if isinstance(part, tuple) else list(map(_plain, part)) for part in parts])
            )
        self._send(data)

    def _write(self, value: Any) -> None:  # noqa: ANN401 - what marshal takes
        self._send(marshal.dumps(value))

    def _send(self, data: bytes) -> None:
        pipe = self._pipe(self._child.stdin)
        left = memoryview(len(data).to_bytes(_SIZE, "little") + data)
        while left:
            left = left[pipe.write(left) :]

    def _answer(self) -> bytes:
        """Read one line, waiting no longer than a request may take."""
        import select

        pipe = self._pipe(self._child.stdout)
        deadline = time.monotonic() + self._patience
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise ProcessLostError(f"it has not answered for {self._patience:g} s")
            piece = os.read(pipe.fileno(), 4096)
            if not piece:
                raise ProcessLostError(f"it ended with code {self._child.poll()}")
            line += piece
        return line[:-1]

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None  # noqa: S101 - both were asked for
        return pipe


def _plain(span: PlainSpan) -> tuple[Any, ...]:
    """Return a span as values that ``marshal`` takes: exact dictionaries, tuples, texts and numbers."""
    events = tuple((name, when, dict(attributes)) for name, when, attributes in span[8])
    return (*span[:6], dict(span[6]), span[7], events, *span[9:])


def _exact(value: Any) -> Any:  # noqa: ANN401 - as deep as spans go
    """Return a value with every text and number as exactly that."""
    if isinstance(value, dict):
        return {str(name): _exact(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_exact(item) for item in value) if type(value) in {list, tuple} else tuple(value)
    if isinstance(value, bytes):
        return value
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    return str(value)


def main() -> int:
    """Be the process: read batches from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="quiesce-parent", daemon=True).start()
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    greeting = _read(source)
    if greeting is None:
        return 0
    writer = _writer(greeting)
    while (batch := _read(source)) is not None:
        try:
            told = f"{_TAKEN} {writer.parts(batch)}"
        except OtlpSendError as error:
            told = f"{'retry' if error.retryable else 'never'} {error.problem}"
        answers.write(" ".join(told.split()).encode() + b"\n")
        answers.flush()
    writer.close()
    return 0


def _end_with_parent() -> None:
    """End the process once the pipe is closed, whatever it is doing then."""
    import select

    watched = select.poll()
    watched.register(0, 0)  # the end of a pipe is told without being asked for
    watched.poll()
    time.sleep(LAST_SECONDS)
    os._exit(0)


def _writer(greeting: Mapping[str, Any]) -> OtlpWriter:
    from quiesce_exporters.otlp import OtlpWriter

    told = dict(greeting["endpoint"])
    certificate = told.pop("certificate")
    endpoint = Endpoint(certificate=None if certificate is None else Path(certificate), **told)
    return OtlpWriter(
        OtlpConfig(endpoint, None),
        greeting["resource"],
        version=greeting["version"],
        started=greeting["started"],
    )


def _read(source: IO[bytes]) -> Any:  # noqa: ANN401 - whatever was marshalled
    """Return the next message, or None when the parent is gone."""
    head = source.read(_SIZE)
    if len(head) < _SIZE:
        return None
    size = int.from_bytes(head, "little")
    if size > _LONGEST:
        return None
    data = source.read(size)
    return None if len(data) < size else marshal.loads(data)  # noqa: S302 - written by the parent, over its own pipe


_PROCESSES: weakref.WeakSet[ExportProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for process in list(_PROCESSES):
        process.forget()


os.register_at_fork(after_in_child=_after_fork)


if __name__ == "__main__":
    sys.exit(main())
