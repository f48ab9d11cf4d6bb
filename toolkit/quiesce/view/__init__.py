"""``quiesce view``: the dashboards in a browser, from a real Prometheus over one or more run folders.

Rule: a run is only read; what is started is on loopback, ends with this process however that ends, and writes into
one folder, which may be deleted. Nothing here is imported by a run.

How it fits together::

    run folders ── folders ──> targets/*.json ─────────────> Prometheus ──┐
         │                                                      ^  │      │
         ├─ backfill (samples -> OpenMetrics -> promtool) ──────┘  └─> Alertmanager
         │   past_alerts (the rules over the past)                        │
         ├─ traces, exemplars (recorded spans) ──────────────┐            │
         └─ violations.jsonl ──────────────────────────────> app <────────┘ <── a browser: page/

``programs`` finds the programs, ``supervise`` keeps them running (through ``launch``, so that none outlives this
process), ``backend`` puts these together, ``app`` is the HTTP side, ``session`` is one call of the command. Needs the
extra ``view``.
"""
