"""Pretraining, supervised fine-tuning and DPO of Hugging Face checkpoints on Megatron-Core.

`settings` holds the options of the user. `data.encode` and `data.dataset` turn rows into sequences
of tokens. `data.order` chooses the examples of each step, and `data.micro_batches` distributes them
over micro-batches. `losses` computes the losses, and `run` is the training loop.
"""
