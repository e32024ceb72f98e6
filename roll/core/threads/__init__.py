"""Helpers for threads: event loops of their own, calls of their own, locks that are fair."""
