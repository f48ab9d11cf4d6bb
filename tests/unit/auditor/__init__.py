"""Tests of the auditor, one file per module."""
