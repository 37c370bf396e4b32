"""Trackers that a run's metrics go to (wandb, mlflow, ...), chosen by name through `registry`."""
