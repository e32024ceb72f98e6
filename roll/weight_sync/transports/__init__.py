"""Transports that move the bytes of a push: shared memory, CUDA IPC, broadcast, files."""
