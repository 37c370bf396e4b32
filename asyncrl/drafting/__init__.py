"""Draft heads for speculative decoding: hidden states, training, checkpoints, and the bandit that picks a depth."""
