"""Code that the adapters of inference engines share."""
