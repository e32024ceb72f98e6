"""`roll samples`: the samples that a run has kept, filtered, sorted, and shown to a person."""
