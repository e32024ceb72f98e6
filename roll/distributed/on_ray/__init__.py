"""Everything that calls Ray: actors, clusters of them, nodes, start and end."""
