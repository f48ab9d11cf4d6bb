"""Seeded and exhaustive schedules of small scenarios."""
