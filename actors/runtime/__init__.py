"""How actors run, on Ray or in process: spawning, attaching to a cluster, resources, auth, health probes, metrics.

The only part of `actors` that knows Ray; the actors themselves are plain classes with async methods.
"""
