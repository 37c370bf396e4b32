"""The trajectory buffer: a ledger of where every slot is, a journal of its decisions, and a log of trajectories.

`store` has the buffer itself, `ledger` its rules without files or clock, `replay` what a recorded run trained on.
"""
