"""Every order in which asyncio code, or threads, can run, tried on purpose.

::

    points.py      pause(), watch(): for scenarios
    loop.py        what may run next, precisely
    steps.py       its records
    jobs.py        blocking calls, one piece at a time; pause_thread()
    schedules.py   the strategies, and schedules as text
    explore.py     explore(), replay(), reports and shrunk failures

    threads.py             explore_threads(), replay_threads(), together(), switch_point()
    threads_run.py         one schedule of threads: who may go on, precisely
    threads_standins.py    controlled Lock, Condition, Thread, ... and time
    threads_queues.py      controlled queues
    threads_patches.py     putting them into modules; watching attributes, and lines
    threads_footprints.py  what steps touch, and which orders that makes superfluous

A scenario is an ``async def`` without arguments. It needs nothing of Quiesce, and runs in any other loop too::

    async def lost_update() -> None:
        account = Account()
        await asyncio.gather(account.deposit(1), account.deposit(1))
        assert account.balance == 2

    explore(lost_update).check()

One of threads is a plain function, run by :func:`explore_threads`; see :mod:`quiesce.explorer.threads`.
"""

from quiesce.explorer.explore import ExplorationFailedError, Failure, Report, Scenario, explore, replay
from quiesce.explorer.jobs import pause_thread
from quiesce.explorer.loop import Freedom, Timers
from quiesce.explorer.points import pause, watch
from quiesce.explorer.threads import explore_threads, replay_threads, switch_point, together

__all__ = [
    "ExplorationFailedError",
    "Failure",
    "Freedom",
    "Report",
    "Scenario",
    "Timers",
    "explore",
    "explore_threads",
    "pause",
    "pause_thread",
    "replay",
    "replay_threads",
    "switch_point",
    "together",
    "watch",
]
