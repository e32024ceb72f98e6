"""Functions that training and scoring backends share."""
