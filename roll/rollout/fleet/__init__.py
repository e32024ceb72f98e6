"""Inference replicas behind one `generate`: routing, health checks, and moves of requests."""
