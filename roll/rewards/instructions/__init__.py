"""The `ifeval` reward: instructions that a program can check."""
