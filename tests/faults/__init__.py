"""Named faults; each test asserts that its fault fired."""
