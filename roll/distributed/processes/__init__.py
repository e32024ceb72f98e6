"""Processes of a run on one machine: forked workers, orderly shutdown, clean-up after a kill."""
