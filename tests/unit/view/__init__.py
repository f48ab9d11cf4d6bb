"""Tests of the dashboards in a browser: the side that needs no program of the distribution."""
