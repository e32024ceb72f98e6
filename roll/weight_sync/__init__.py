"""Moves trained weights to inference engines in bounded buckets; torch only, no ray."""
