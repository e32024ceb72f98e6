"""Training data: encoding of data files, datasets, order of examples, and micro-batches."""
