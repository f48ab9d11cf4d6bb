"""The reference run: a real torch policy trained with GRPO through the public API of `quiesce`."""
