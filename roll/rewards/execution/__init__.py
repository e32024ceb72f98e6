"""Run rewards within bounds: threads, child processes, time limits, counts of failures."""
