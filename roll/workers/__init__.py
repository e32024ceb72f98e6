"""Roles: a cluster's worker is a strategy plus what the driver asks of it."""
