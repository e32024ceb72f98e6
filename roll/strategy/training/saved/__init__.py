"""Files of a checkpoint that training backends write and read."""
