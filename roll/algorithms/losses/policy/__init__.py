"""Policy losses, one file per paper, and what they share."""
