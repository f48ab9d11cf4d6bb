"""Tests of the rules, the runbooks and the dashboards."""
