"""Execution of rewards with limits: threads, child processes, time limits, counts of failures."""
