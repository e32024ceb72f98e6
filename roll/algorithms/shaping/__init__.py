"""Rewards, samples and advantages reshaped around the estimator; one file per idea."""
