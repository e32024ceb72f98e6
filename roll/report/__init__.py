"""The report on a run, read from its folder: curves, alarms, samples, and one page that shows them.

`read`, `health` and `samples` know nothing about pages, so that a live view can use them.
"""
