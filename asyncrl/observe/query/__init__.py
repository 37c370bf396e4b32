"""A run's files as SQL tables, and the ready queries of `asyncrl query`."""
