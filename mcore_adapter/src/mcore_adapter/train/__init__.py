"""Pretraining, supervised fine-tuning and DPO of Hugging Face checkpoints on Megatron-Core.

`settings` is what a user says, `encode` and `dataset` make sequences of rows, `order` and `plan`
decide which of them lie in which micro-batch, `losses` is the maths, `run` the loop.
"""
