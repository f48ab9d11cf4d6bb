"""What a run measures about itself: the catalogue of names, metrics, and the run log.

Rule: telemetry subscribes to hooks and pulls statistics; no primitive knows that it exists. Nothing is
started by importing it.

==============  ==================================================================================
module          idea
==============  ==================================================================================
``names``       the one catalogue: metrics; with ``labels``, ``span_names`` and ``log_names``
``histogram``   bucket counts in a plain list; counters and gauges beside them
``slots``       what is counted and recorded about every slot
``metrics``     the observer that turns hooks into numbers; with ``checkpoint_metrics``, ``gate_metrics``
``spans``       the observer that notes rarer hooks
``story``       makes a tree of spans of such notes
``convert``     the thread that makes spans and exemplars
``tracing``     our own spans; ``provider``: those of an application's tracer provider
``finished``    a span that has ended, as plain data
``sinks``       what an exporter of spans, samples and events is
``pipeline``    a queue and a thread in front of each sink
``assembly``    all of these, put together and switched on
``gpu``         what the process's CUDA devices hold
``collector``   reads those numbers, and the primitives' statistics, when somebody scrapes
``enable``      switches metrics on: one call, one endpoint
``logs``        the run's JSON log, and its readable form
``reference``   writes the reference page from the catalogue
==============  ==================================================================================
"""
