"""Megatron-Core: training and scoring with tensor, pipeline and expert parallelism."""
