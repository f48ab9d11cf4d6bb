"""Real Prometheus and real Alertmanager of `.tools/`, as processes of a test."""

from __future__ import annotations

import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tests.alert_receiver import AlertReceiver, until

__all__ = ["TOOLS", "alertmanager", "free_port", "paged", "program", "prometheus"]

TOOLS: Final = Path(__file__).parents[1] / ".tools" / "bin"

_SHARE: Final = b"/usr/share/prometheus/alertmanager"
"""Where the distribution's Alertmanager looks for its templates; `make tools` installs nothing there."""

_HERE: Final = "share"


_HELD: Final[list[socket.socket]] = []


def free_port() -> int:
    """Return a port of the loopback interface that refuses connections until somebody listens there on purpose.

    It stays bound, without listening, so that the kernel gives it to nobody who asks for any port; a server that sets
    ``SO_REUSEADDR``, as all here do, can have it all the same.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


@contextmanager
def program(executable: Path, folder: Path, *arguments: str, ready: str) -> Iterator[None]:
    """Run a program until the end of the block; the block begins once it answers there.

    Args:
        executable: The program.
        folder: Where it runs; gets its log.
        arguments: Its arguments.
        ready: An address that answers 200 when it is ready.
    """
    path = folder / f"{executable.name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen([executable, *arguments], stdout=log, stderr=log, cwd=folder)
    try:

        def answers() -> bool:
            assert process.poll() is None, path.read_text()
            try:
                with urllib.request.urlopen(ready, timeout=2) as answer:  # noqa: S310 - an address of this test
                    return bool(answer.status == 200)
            except OSError:
                return False

        until(answers, 50)
        yield
    finally:
        process.terminate()
        process.wait(50)


@contextmanager
def alertmanager(
    folder: Path, receiver: AlertReceiver, port: int, config: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Run an Alertmanager that tells the receiver, at once and of every alert; yield its address.

    Args:
        folder: Where it keeps its files.
        receiver: A webhook.
        port: Where it listens.
        config: Its configuration; None makes one.
    """
    if config is None:
        config = {
            "route": {
                "receiver": "hook",
                "group_by": ["..."],
                "group_wait": "100ms",
                "group_interval": "200ms",
                "repeat_interval": "1h",
            },
            "receivers": [
                {"name": "hook", "webhook_configs": [{"url": receiver.url, "send_resolved": True}]}
            ],
        }
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    arguments = (
        f"--config.file={path}",
        f"--storage.path={folder / 'alertmanager-data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    )
    with program(_moved(folder), folder, *arguments, ready=f"{url}/-/ready"):
        yield url


@contextmanager
def prometheus(
    folder: Path,
    *,
    rules: Path,
    targets: Path,
    alertmanagers: Sequence[int],
    port: int,
    interval: str = "500ms",
    further: Sequence[str] = (),
) -> Iterator[str]:
    """Run a Prometheus over a folder of targets; yield its address.

    Args:
        folder: Where it keeps its files.
        rules: A rule file.
        targets: The folder that runs write their targets into.
        alertmanagers: Ports of Alertmanagers.
        port: Where it listens.
        interval: How often it scrapes and evaluates.
        further: More arguments.
    """
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(rules)],
        "alerting": {
            "alertmanagers": [
                {"static_configs": [{"targets": [f"127.0.0.1:{each}" for each in alertmanagers]}]}
            ]
        },
        "scrape_configs": [
            {
                "job_name": "quiesce",
                "file_sd_configs": [{"files": [f"{targets}/*.json"], "refresh_interval": "1s"}],
            }
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    arguments = (
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'prometheus-data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        *further,
    )
    with program(TOOLS / "prometheus", folder, *arguments, ready=f"{url}/-/ready"):
        yield url


def paged(receiver: AlertReceiver, status: str = "firing") -> set[str]:
    """Return the names of the alerts that arrived."""
    return {alert["labels"]["alertname"] for alert in receiver.alerts() if alert["status"] == status}


def _moved(folder: Path) -> Path:
    """Copy the fetched Alertmanager, with its templates beside it.

    The distribution compiles an absolute path into the program, and unpacking a package does not install it. A relative
    path of the same length takes its place in the copy.
    """
    original = (TOOLS / "alertmanager").resolve()
    here = (f"./{_HERE:/>{len(_SHARE) - 2}}").encode()  # slashes in a row are one
    copy = folder / "alertmanager"
    copy.write_bytes(original.read_bytes().replace(_SHARE, here))
    copy.chmod(0o755)
    templates = original.parents[2] / _SHARE.decode().lstrip("/")
    if templates.is_dir() and not (folder / _HERE).exists():
        shutil.copytree(templates, folder / _HERE, ignore=shutil.ignore_patterns("ui"))
    return copy
