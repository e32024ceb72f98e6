"""Running system of an RLVR run: clusters, inference service, reward router, weight pusher."""
