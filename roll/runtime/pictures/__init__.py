"""Patches of the pictures of a run, made in workers."""
