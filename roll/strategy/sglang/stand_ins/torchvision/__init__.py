"""Stands in for torchvision on a machine without an accelerator.

The published wheel is linked to CUDA and breaks beside a CPU build of torch; SGLang imports it even
for models without vision. Names that SGLang and transformers import while they load can be imported
from here; none of them can be used.
"""
