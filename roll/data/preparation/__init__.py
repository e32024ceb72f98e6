"""Steps of a row between its file and the chat template."""
