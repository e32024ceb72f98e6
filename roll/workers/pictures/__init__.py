"""Worker that makes patches of pictures."""
