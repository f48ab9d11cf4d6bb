"""The page about a run: one file that is opened in a browser, made from what the run recorded.

Rule: the page needs nothing but itself (no network, no server, no folder beside it), and shows no empty chart:
where the recording has nothing, a sentence says why. Nothing here suspends.

``timeline`` puts numbers into bins, ``collect`` reads a recording into ``data``, with ``attempts`` for what is told of
saves and ``cutoffs`` for those that never ended; ``saves``, ``slots``, ``progress`` and
``tables`` make charts and tables of that, ``figures`` puts these in order, ``page`` makes the file. Needs the
extra ``report``.
"""

from quiesce.report.page import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
