"""PyTorch FSDP2: training and scoring, sharded over ranks."""
