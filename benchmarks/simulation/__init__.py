"""Simulation for the rollout code: runs the real code with scripted engines in virtual time."""
