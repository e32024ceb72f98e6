"""Training and scoring with DeepSpeed ZeRO.

ZeRO partitions optimizer states, gradients or parameters over the ranks.
"""
