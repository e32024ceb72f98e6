"""Checks of parts of a run file, for `roll check` and `roll run`."""
