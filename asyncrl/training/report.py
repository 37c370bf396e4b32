"""What one optimizer step reports; apart from the learner so that reading it imports no torch."""

import msgspec


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did."""

    version: int
    """The policy version that the step produced."""
    samples: int
    tokens: int
    loss: float
    grad_norm: float
    skipped: bool
    """True when loss or gradient was not finite: weights are unchanged, the version still moves on."""
    figures: dict[str, float]
