"""Every order in which asyncio code can run, tried on purpose.

::

    points.py      pause(), watch(): for scenarios
    loop.py        what may run next, precisely
    steps.py       its records
    jobs.py        blocking calls, one piece at a time; pause_thread()
    schedules.py   the strategies, and schedules as text
    explore.py     explore(), replay(), reports and shrunk failures

A scenario is an ``async def`` without arguments. It needs nothing of Quiesce, and runs in any other loop too::

    async def lost_update() -> None:
        account = Account()
        await asyncio.gather(account.deposit(1), account.deposit(1))
        assert account.balance == 2

    explore(lost_update).check()
"""

from quiesce.explorer.explore import ExplorationFailedError, Failure, Report, Scenario, explore, replay
from quiesce.explorer.jobs import pause_thread
from quiesce.explorer.loop import Freedom, Timers
from quiesce.explorer.points import pause, watch

__all__ = [
    "ExplorationFailedError",
    "Failure",
    "Freedom",
    "Report",
    "Scenario",
    "Timers",
    "explore",
    "pause",
    "pause_thread",
    "replay",
    "watch",
]
