"""The tests of Quiesce; README.md says where a new one goes."""
