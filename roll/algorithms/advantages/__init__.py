"""Rewards to advantages, one file per family."""
