"""Faults for `asyncrl chaos`: a plan from a seed, rewards that fail, and damage to files."""
