"""Ways out of the process for what a run measures: one module per destination."""
