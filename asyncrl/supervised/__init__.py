"""Supervised starts: examples that somebody else wrote, as trajectories of which the model's own tokens are trained on.

`examples` is the table with its order, `conversations` makes turns of a row, `layout` makes tokens of turns.
"""
