"""Tests of the data plane's modules."""
