"""Files of a pipeline beside its records: checkpoints, and samples for people to read."""
