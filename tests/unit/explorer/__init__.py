"""Tests of the schedule explorer."""
