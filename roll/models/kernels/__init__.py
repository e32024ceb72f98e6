"""Choice of what computes the layers of a Hugging Face model: attention kernels, torch.compile."""
