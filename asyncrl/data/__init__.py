"""Data formats: trajectories as Arrow rows, tokenizers and chat templates, reward parts, files that others wrote."""
