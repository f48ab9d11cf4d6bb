"""The documented usage, type-checked and never run."""
