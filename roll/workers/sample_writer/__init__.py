"""Worker that writes the samples of a run into files."""
