"""`asyncrl simulate`: a run on a virtual clock: the real buffer and policies, with costs for what takes time."""
