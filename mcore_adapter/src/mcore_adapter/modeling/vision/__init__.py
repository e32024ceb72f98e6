"""Models that see: a vision tower, positions on three axes, features added to layers."""
