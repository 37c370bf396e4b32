"""What would run, what it needs and what stands in its way: found without torch, Ray or a GPU."""
