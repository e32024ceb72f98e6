"""Sources of the samples of a step: engines and rewards, or files of samples."""
