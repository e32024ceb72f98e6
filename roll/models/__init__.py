"""Hugging Face models and tokenizers, and the head that turns hidden states into logits."""
