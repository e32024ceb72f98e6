"""Rewards: what users write, how it is run within bounds, and the built-in ones."""
