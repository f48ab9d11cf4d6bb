"""Tests of telemetry: names, numbers, scrapes, logs."""
