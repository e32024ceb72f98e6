"""DeepSpeed ZeRO: training and scoring, with states, gradients or parameters shared out."""
