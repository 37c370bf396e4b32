"""How far generation may run ahead of training: as far as `max_staleness` always, or as a figure in a band allows."""

from asyncrl.settings import Fraction, NonNegative, Positive, Settings


class FixedStaleness(Settings, frozen=True, kw_only=True, tag_field="type", tag="fixed"):
    """The bound is `max_staleness`, and every optimizer step is published."""


class EssBand(Settings, frozen=True, kw_only=True, tag_field="type", tag="ess"):
    """Hold the effective sample size of pi / mu between `low` and `high`."""

    low: Fraction = 0.90
    high: Fraction = 0.97
    window: Positive = 3
    """Steps whose median is judged."""
    publish_every_max: Positive = 4
    """Most optimizer steps between two publications; never more than `max_staleness`."""

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)


class KlBand(Settings, frozen=True, kw_only=True, tag_field="type", tag="kl"):
    """Hold the mismatch KL, `log mu - log pi` per token, between `low` and `high`.

    The defaults are those of the ESS band: for a normal log-ratio of variance s, KL = s / 2 and ESS = exp(-s).
    """

    low: NonNegative = 0.015
    high: NonNegative = 0.05
    window: Positive = 3
    """Steps whose median is judged."""
    publish_every_max: Positive = 4
    """Most optimizer steps between two publications; never more than `max_staleness`."""

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)


StalenessControl = FixedStaleness | EssBand | KlBand


def _check_band(low: float, high: float) -> None:
    if low >= high:
        raise ValueError(f"low={low:g} must be below high={high:g}")
