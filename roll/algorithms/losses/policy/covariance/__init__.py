"""Losses that treat a few tokens apart: those whose log-prob and advantage vary together."""
