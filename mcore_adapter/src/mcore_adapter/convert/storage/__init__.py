"""Files of checkpoints: found, read and written at the level of bytes."""
