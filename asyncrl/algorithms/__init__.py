"""Losses, advantages and off-policy corrections, each chosen by name through `registry`."""
