"""The watch that the crash tests stand on misses nothing: checked against the kernel's view, and the interpreter's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.forkserver import ROOT, ForkPool
from tests.crash.lives import SCENARIOS
from tests.crash.operations import Operation, Watch

TOOLS = ROOT / ".tools"

CHANGING = (
    "open,openat,openat2,creat,write,writev,pwrite64,pwritev,pwritev2,sendfile,splice,copy_file_range,fsync,fdatasync,"
    "syncfs,sync_file_range,msync,truncate,ftruncate,fallocate,mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,"
    "link,linkat,symlink,symlinkat,mknod,mknodat,mmap"
)
"""Every system call that can change a file or a folder, or make a change durable."""

SCRIPT = """
import json, sys
from pathlib import Path
from tests.crash import lives
print(json.dumps({
    scenario: lives.live(str(Path(sys.argv[1], scenario, "run")), scenario, record=True)["operations"]
    for scenario in sys.argv[2:]
}))
"""

CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+)")
OPENED = re.compile(r"^\d+<([^>]*)>")
QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def of_strace(line: str, root: str) -> tuple[str, str] | None:
    """Return what one line of strace's output changes under the root, as the watch calls it."""
    found = CALL.match(line)
    if found is None or found[3].startswith("-"):
        return None
    call, arguments = found[1], found[2]
    opened = OPENED.match(arguments)
    names = QUOTED.findall(arguments)
    if call in {"open", "openat", "openat2", "creat", "mmap"}:
        if call == "mmap":
            shared = "MAP_SHARED" in arguments and "PROT_WRITE" in arguments and f"<{root}/" in arguments
            return ("mmap", arguments) if shared else None
        if "O_CREAT" not in arguments and "O_TRUNC" not in arguments and call != "creat":
            return None
        path = _absolute(names[0], arguments)
        return ("open", os.path.relpath(path, root)) if path.startswith(f"{root}/") else None
    if call in {
        "write",
        "writev",
        "pwrite64",
        "pwritev",
        "pwritev2",
        "fsync",
        "fdatasync",
        "ftruncate",
        "fallocate",
    }:
        path = opened[1] if opened else ""
        kind = {
            "fsync": "fsync",
            "fdatasync": "fsync",
            "ftruncate": "truncate",
            "fallocate": "fallocate",
        }.get(call, "write")
    else:
        path = _absolute(names[0], arguments) if names else (opened[1] if opened else "")
        kind = {
            "mkdir": "mkdir",
            "mkdirat": "mkdir",
            "rename": "rename",
            "renameat": "rename",
            "renameat2": "rename",
        }.get(
            call,
            "rmdir"
            if call == "rmdir" or "AT_REMOVEDIR" in arguments
            else "unlink"
            if "unlink" in call
            else call,
        )
    return (kind, os.path.relpath(path, root)) if f"{path}/".startswith(f"{root}/") else None


def _absolute(name: str, arguments: str) -> str:
    """Return the path that a name means, beside the folder that strace shows with the descriptor."""
    if name.startswith("/"):
        return os.path.normpath(name)
    folder = re.match(r"(?:\d+|AT_FDCWD)<([^>]*)>", arguments)
    return os.path.normpath(os.path.join(folder[1], name)) if folder else name  # noqa: PTH118 - text


def normal(path: str) -> str:
    """Leave the cut's id out of a temporary folder's name."""
    return re.sub(r"(step_\d+)\.tmp-i\d+-[^/]+", r"\1.tmp", path)


@pytest.mark.distribution
@pytest.mark.timeout(240)  # nothing in it waits: it takes as long as the machine takes
def test_the_kernel_sees_what_the_watch_sees(
    pool: ForkPool, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Traced by strace, each life makes exactly the calls that the watch lists, as often, on the same paths."""
    strace = TOOLS / "bin" / "strace"
    assert strace.exists(), f"{strace} is missing; `make tools` fetches it"
    disk, traces = tmp_path / "disk", tmp_path / "traces"
    traces.mkdir()
    for scenario in SCENARIOS:
        (disk / scenario).mkdir(parents=True)
        pool.call("tests.crash.lives:build", path=str(disk / scenario / "run"), scenario=scenario).value()
    libraries = [str(folder) for folder in (TOOLS / "root" / "usr" / "lib").glob("*-linux-*")]

    ended = subprocess.run(
        [
            strace, "-ff", "-y", "-s", "0", "-e", f"trace={CHANGING}", "-e", "signal=none", "-o", traces / "of",
            sys.executable, "-c", SCRIPT, disk, *SCENARIOS,
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep),
        },
        check=False,
        capture_output=True,
        text=True,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    lines = [line for file in traces.iterdir() for line in file.read_text(errors="replace").splitlines()]
    calls = 0
    for scenario, operations in json.loads(ended.stdout).items():
        root = os.path.realpath(disk / scenario)
        traced = [found for line in lines if (found := of_strace(line, root)) is not None]
        calls += compare(traced, [(kind, normal(name)) for kind, name, *_ in operations])
    tell(f"{calls} system calls of {len(SCENARIOS)} lives")
    assert calls > 50 * len(SCENARIOS)


def compare(traced: list[tuple[str, str]], watched: list[tuple[str, str]]) -> int:
    """Assert that both are the same changes; return how many."""
    traced = [(kind, normal(name)) for kind, name in traced]
    kinds = ("write", "fsync", "mkdir", "rename", "unlink", "rmdir")
    assert Counter(call for call in traced if call[0] in kinds) == Counter(
        call for call in watched if call[0] in kinds
    )
    kept = {"run/run.lock", "run/lineage.jsonl"}  # opened with O_CREAT, and there already
    opened = {name for kind, name in traced if kind == "open"}
    assert opened - kept <= {name for kind, name in watched if kind in {"create", "truncate"}}
    assert {name for kind, name in watched if kind == "create"} <= opened
    assert {kind for kind, _ in traced} <= {*kinds, "open", "truncate"}
    return len(traced)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_interpreter_reports_nothing_that_the_watch_misses(
    scenario: str, pool: ForkPool, tmp_path: Path
) -> None:
    """Every file that is created, renamed or deleted through Python, by whatever library, is in the watch's list."""
    path = str(tmp_path / "run")
    pool.call("tests.crash.lives:build", path=path, scenario=scenario).value()

    found = pool.call("tests.crash.lives:audited", path=path, scenario=scenario).value()

    assert found["missing"] == []
    assert len(found["reported"]) > 10


def test_a_watch_sees_every_way_to_write(tmp_path: Path) -> None:
    """Descriptors, buffered and text files, paths beside a folder's descriptor, appending; and nothing outside its root."""
    root = tmp_path / "root"
    root.mkdir()
    seen: list[Operation] = []
    with Watch(root, after=seen.append).installed():
        (root / "folder").mkdir()
        (root / "folder" / "text").write_text("text")
        with (root / "binary").open("wb") as file:
            file.write(b"one")
            file.flush()
            file.write(b"two")
            os.fsync(file.fileno())
        folder = os.open(root, os.O_RDONLY)
        fd = os.open("beside", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
        os.write(fd, b"abc")
        os.pwrite(fd, b"z", 1)
        os.ftruncate(fd, 2)
        os.close(fd)
        os.fsync(folder)
        os.close(folder)
        with (root / "binary").open("ab") as file:
            file.write(b"three")
        (root / "binary").rename(root / "renamed")
        (root / "renamed").unlink()
        (tmp_path / "outside").write_text("not watched")
        with pytest.raises(AssertionError, match="teach the watch"):
            os.link(root / "beside", root / "again")

    assert [(operation.kind, operation.path, operation.data, operation.offset) for operation in seen] == [
        ("mkdir", "folder", b"", 0),
        ("create", "folder/text", b"", 0),
        ("write", "folder/text", b"text", 0),
        ("close", "folder/text", b"", 0),
        ("create", "binary", b"", 0),
        ("write", "binary", b"one", 0),
        ("fsync", "binary", b"", 0),
        ("write", "binary", b"two", 3),
        ("close", "binary", b"", 0),
        ("create", "beside", b"", 0),
        ("write", "beside", b"abc", 0),
        ("write", "beside", b"z", 1),
        ("truncate", "beside", b"", 2),
        ("close", "beside", b"", 0),
        ("fsync", ".", b"", 0),
        ("write", "binary", b"three", 6),
        ("close", "binary", b"", 0),
        ("rename", "binary", b"", 0),
        ("unlink", "renamed", b"", 0),
    ]
