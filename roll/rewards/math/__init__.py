"""The `math` reward: find the final answer, compare it with the ground truth."""
