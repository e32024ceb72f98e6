"""All inference replicas behind one `generate`: routing, health, and what moves on a loss."""
