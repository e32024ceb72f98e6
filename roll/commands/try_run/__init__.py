"""`roll try`: three tiny steps of a run on this machine, with small random models."""
