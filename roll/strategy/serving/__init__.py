"""Functions that inference engines share."""
