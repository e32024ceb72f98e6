"""Metrics of the machines of a run: speed of passes, memory, GPUs, network and disks."""
