"""Backends: what trains, scores and generates, each behind one of three interfaces in `api`."""
