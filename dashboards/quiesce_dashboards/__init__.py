"""Dashboards, recording rules and alerts, built from the catalogue of metric names."""
