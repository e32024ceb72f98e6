"""Processes of a run on one machine: forks of workers, orderly shutdown, clean-up after a kill."""
