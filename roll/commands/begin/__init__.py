"""The first minutes with roll: examples to copy, and a run file of one's own."""
