"""Rewards: the interface for users, execution with limits, and the built-in rewards."""
