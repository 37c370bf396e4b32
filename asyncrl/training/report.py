"""What one optimizer step reports; apart from the learner so that reading it imports no torch."""

import msgspec


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """The off-policy figures of a part of the step's tokens."""

    by: str
    """`age`, the version gap of the tokens, or `precision` of the rollout."""
    value: str
    tokens: int
    rho_mean: float
    ess: float
    mismatch_kl: float
    mismatch_k3: float


class OffPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The sample of a step whose log-probabilities differ most between trainer and engine."""

    group: int
    sample: int
    size: float
    """Mean of the absolute values."""
    log_ratio: tuple[float, ...]
    """log pi - log mu of its sampled tokens, of the first some thousand."""


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
    fault: str = ""
    """Why the step was skipped, and which samples did it."""
    figures: dict[str, float]
    shares: tuple[Share, ...] = ()
    off_policy: OffPolicy | None = None
    """An example to look at."""
    alarms: tuple[str, ...] = ()
    """Figures beyond their documented levels, each with what to do about it."""
