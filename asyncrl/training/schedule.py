"""The learning rate over a run: it grows, stays, and falls."""

from asyncrl.training.settings import Trainer


def learning_rate(settings: Trainer, step: int, steps: int) -> float:
    """Of the `step`-th step, from 0, of `steps`. Neither the first step nor the last is without learning."""
    grown = (step + 1) / settings.warmup_steps if settings.warmup_steps else 1.0
    left = (steps - step) / (settings.decay_steps + 1) if settings.decay_steps else 1.0
    return settings.lr * max(0.0, min(1.0, grown, left))
