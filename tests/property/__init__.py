"""Hypothesis state machines against small models, and pure functions over generated input."""
