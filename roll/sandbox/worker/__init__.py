"""The worker: a process that watches a template and its jobs, and judges how each job ended.

It is started as a program of its own, outside of every level, and imports nothing of its parents.
"""
