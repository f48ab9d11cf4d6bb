"""Tests of the drills, one file per module."""
