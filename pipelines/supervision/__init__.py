"""Watching a run: asks the actors, notices stalls, and ends or explains a run that makes no progress."""
