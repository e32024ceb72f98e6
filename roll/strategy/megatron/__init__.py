"""Training and scoring with Megatron-Core: tensor, pipeline and expert parallelism."""
