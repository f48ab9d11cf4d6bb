"""Small classes that use threads like anybody's code: some right, some wrong. The tests explore them."""

from __future__ import annotations

import queue
import threading
import time
from time import monotonic
from typing import Final

__all__ = ["REGISTRY_LOCK", "Account", "Box", "Forks", "Latch", "Once", "Plain", "Pump", "Registry"]

REGISTRY_LOCK: Final = threading.Lock()


class Account:
    """Deposits under a lock, or between two of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.balance = 0

    def deposit(self) -> None:
        """Read and write in one section."""
        with self.lock:
            self.balance += 1

    def careless_deposit(self) -> None:
        """Read in one section, write in another."""
        with self.lock:
            before = self.balance
        with self.lock:
            self.balance = before + 1


class Plain:
    """A counter that no lock guards."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        """Read, then write."""
        before = self.count
        self.count = before + 1


class Once:
    """Does something once, or so it thinks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.times = 0

    def do(self) -> None:
        """Check, then act."""
        if not self.done.is_set():
            self.done.set()
            self.times += 1


class Latch:
    """Waits for a flag with a condition; wrong if it looks at the flag before it takes the lock."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.flag = False

    def open(self) -> None:
        """Set the flag."""
        with self.changed:
            self.flag = True
            self.changed.notify_all()

    def wait(self) -> None:
        """Wait, rightly."""
        with self.changed:
            while not self.flag:
                self.changed.wait()

    def careless_wait(self) -> None:
        """Miss the notification that comes between the look and the wait."""
        if not self.looks_open():
            with self.changed:
                self.changed.wait()

    def looks_open(self) -> bool:
        """Look at the flag."""
        with self.changed:
            return self.flag


class Forks:
    """Two locks, taken in two orders."""

    def __init__(self) -> None:
        self.left = threading.Lock()
        self.right = threading.Lock()

    def left_first(self) -> None:
        """Take left, then right."""
        with self.left, self.right:
            pass

    def right_first(self) -> None:
        """Take right, then left."""
        with self.right:
            self.left.acquire(timeout=-1)
            self.left.release()


class Pump:
    """A daemon thread that works on what is queued."""

    def __init__(self) -> None:
        self.jobs: queue.Queue[int | None] = queue.Queue(2)
        self.total = 0
        self.thread = threading.Thread(target=self.run, name="pump", daemon=True)

    def run(self) -> None:
        """Add up, until None comes."""
        while True:
            job = self.jobs.get()
            if job is not None:
                self.total += job
            self.jobs.task_done()
            if job is None:
                return


class Registry:
    """Uses what was imported by name, and a lock that was made with the module."""

    def __init__(self) -> None:
        self.started = monotonic()
        self.names: list[str] = []

    def add(self, name: str) -> None:
        """Add a name, late."""
        time.sleep(60.0)
        with REGISTRY_LOCK:
            self.names.append(f"{name} after {monotonic() - self.started:g} s")


class Box:
    """One of each primitive; what steps do to it depends on their order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.other = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.event = threading.Event()
        self.queue: queue.Queue[int] = queue.Queue(1)
        self.slots = threading.Semaphore(1)
        self.x = 0
        self.y = 0
        self.log: list[tuple[int, str]] = []

    def step(self, what: str, who: int) -> None:  # noqa: C901, PLR0912 - one short branch for each primitive
        """Do one thing."""
        if what == "locked":
            with self.lock:
                self.x = self.x * 3 + who
        elif what == "reentrant":
            with self.other, self.other:
                self.y = self.y * 3 + who
        elif what == "racy":
            self.x = self.x * 5 + who
        elif what == "notify":
            with self.lock:
                self.changed.notify()
        elif what == "wait":
            with self.lock:
                self.x = self.x * 7 + who + 10 * self.changed.wait(1.0)
        elif what == "set":
            self.event.set()
        elif what == "await":
            self.log.append((who, str(self.event.wait(1.0))))
        elif what == "put":
            try:
                self.queue.put(who, timeout=1.0)
            except queue.Full:
                self.log.append((who, "full"))
        elif what == "get":
            try:
                self.log.append((who, str(self.queue.get(timeout=2.0))))
            except queue.Empty:
                self.log.append((who, "empty"))
        elif what == "try":
            if self.lock.acquire(blocking=False):
                self.y = self.y * 11 + who
                self.lock.release()
            else:
                self.log.append((who, "busy"))
        elif what == "slot":
            with self.slots:
                self.y = self.y * 3 + who
        elif what == "both":
            with self.lock, self.other:
                self.x = self.x * 2 + who
        elif what == "both the other way":
            with self.other, self.lock:
                self.y = self.y * 2 + who

    STEPS: Final = (
        "locked",
        "reentrant",
        "racy",
        "notify",
        "wait",
        "set",
        "await",
        "put",
        "get",
        "try",
        "slot",
        "both",
        "both the other way",
    )
