"""Policy losses, one file per paper, and their shared helper functions."""
