"""Tests of the documentation: what it shows is run, what it lists is complete."""
