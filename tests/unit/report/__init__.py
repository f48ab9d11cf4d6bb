"""Tests of the page about a run."""
