"""Cancel at every point that can suspend; afterwards the statistics are pristine."""
