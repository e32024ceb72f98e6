"""Parts of the data that users bring."""
