"""`roll eval`: measures models, or checkpoints of a run, on sets of questions."""
