"""The `math` reward, which finds the final answer and compares it with the ground truth."""
