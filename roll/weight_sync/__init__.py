"""Transfer of trained weights to inference engines in bounded buckets; needs torch but not Ray."""
