"""Read run files: layers, presets, overrides, and errors that name file, line and key."""
