"""Training and scoring with PyTorch FSDP2, sharded over ranks."""
