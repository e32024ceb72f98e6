"""Where prompts come from: sources, templates, datasets, the order of drawing, balancing."""
