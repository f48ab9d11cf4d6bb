"""Starts the command line in processes of its own, without importing torch once for each.

Rule: a child is forked from a process that has imported everything and started nothing (no thread, no event loop, no
hook), so it behaves as a process that was started by hand. It is a session of its own: signals and terminals are real.

The protocol is one JSON object a line. In: ``number, argv, cwd, out, err, hooks, tty``. Out: ``started`` with a pid and the
number of the request, or ``ended`` with a pid and the exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

POLL_SECONDS = 0.01


def main() -> None:
    """Serve until standard input ends; then end what is left."""
    _import_everything()
    children: set[int] = set()
    pending = b""
    _tell({"ready": os.getpid()})
    while True:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        if readable:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _child(request)
                children.add(pid)
                _tell({"started": pid, "number": request["number"]})
        for pid in tuple(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
                _tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _import_everything() -> None:
    for name in (
        "reasoning_gym",
        "torch.distributed.checkpoint",
        "torchdata.stateful_dataloader",
        "transformers.models.qwen2.modeling_qwen2",
        "quiesce.cli.main",
        "quiesce_grpo.engine",
        "quiesce_grpo.run",
        "quiesce_grpo.trainer",
        "tests.integration.cli_hooks",
    ):
        importlib.import_module(name)


def _tell(message: dict[str, int]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _child(request: dict[str, Any]) -> NoReturn:
    """Become what a shell would have started."""
    os.setsid()
    os.chdir(request["cwd"])
    if request["tty"]:
        # The first terminal that the leader of a session opens is its controlling one.
        for number in range(3):
            _open(number, request["tty"], os.O_RDWR)
        os.environ["TERM"] = "xterm"
    else:
        _open(0, os.devnull, os.O_RDONLY)
        _open(1, request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        _open(2, request["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(number, "w", encoding="utf-8", closefd=False, buffering=1)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)

    from quiesce.cli.main import main as quiesce
    from tests.integration import cli_hooks

    for hook in request["hooks"]:
        getattr(cli_hooks, hook.pop("hook"))(**hook)
    sys.exit(quiesce(request["argv"]))


def _open(number: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o644)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)


if __name__ == "__main__":
    main()
