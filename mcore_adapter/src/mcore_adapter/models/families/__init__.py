"""Families of models, one file each: a table of parameters and fields of Megatron-Core's config."""
