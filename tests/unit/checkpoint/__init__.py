"""What each module of the checkpoint does."""
