"""Unit tests of the reference run."""
