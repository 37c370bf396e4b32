"""The fleet of a run: placing actors, the pool of engines and its elastic size, and what the cluster offers."""
