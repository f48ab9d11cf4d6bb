"""One file per module of the toolkit."""
