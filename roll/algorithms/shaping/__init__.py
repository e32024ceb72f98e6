"""Shaping of rewards, samples and advantages around the estimator; one file per method."""
