"""Real processes, real files, real torch."""
