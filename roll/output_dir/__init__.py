"""The output folder of a run: checkpoints, trackers, summary and lock."""
