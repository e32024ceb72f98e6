"""Training data: sources, chat templates, datasets, the order of drawing rows, batches, packing."""
