"""What the machines of a run do: speed of passes, memory, GPUs, network and disks, as metrics."""
