"""Trials of `roll check`: rows, rewards, environments and sandboxes are tried out."""
