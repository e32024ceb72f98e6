"""Virtual time and scripted engines: the real rollout code at any scale, on one core."""
