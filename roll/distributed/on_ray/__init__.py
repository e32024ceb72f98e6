"""The code that uses Ray: its start and end, nodes, actors, clusters of actors."""
