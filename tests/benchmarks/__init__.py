"""Tests of the benchmarks: that they measure what they say, never how long it took."""
