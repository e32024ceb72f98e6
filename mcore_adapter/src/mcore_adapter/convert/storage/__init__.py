"""Storage of checkpoints: finding, reading and writing files and folders at the level of bytes."""
