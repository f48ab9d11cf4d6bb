"""What a run measures about itself: the catalogue of names, metrics, and the run log.

Rule: telemetry subscribes to hooks and pulls statistics; no primitive knows that it exists. Nothing is
started by importing it.

==============  ==================================================================================
module          idea
==============  ==================================================================================
``names``       the one catalogue: metrics, labels, buckets, log events
``histogram``   bucket counts in a plain list; counters and gauges beside them
``metrics``     the observer that turns hooks into such numbers
``collector``   reads those numbers, and the primitives' statistics, when somebody scrapes
``enable``      switches metrics on: one call, one endpoint
``logs``        the run's JSON log, and its readable form
``reference``   writes the reference page from the catalogue
==============  ==================================================================================
"""
