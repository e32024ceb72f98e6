"""Hugging Face models and tokenizers: loading, adapters, packed rows and names of saved tensors."""
