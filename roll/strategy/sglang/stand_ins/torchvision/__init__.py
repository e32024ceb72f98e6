"""Stand-in for torchvision on a machine without a GPU.

The published wheel is linked to CUDA and fails with a CPU build of torch, but SGLang imports
torchvision even for models without vision. The names that SGLang and transformers import when they
are loaded can be imported from here; none of them can be used.
"""
