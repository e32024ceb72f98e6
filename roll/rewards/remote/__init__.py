"""Rewards that a server of the user computes."""
