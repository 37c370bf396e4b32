"""How many engines a run has, and how much each of them is given at a time."""

from typing import TYPE_CHECKING

from asyncrl.config.base import AboveZero, Fraction, Natural, NonNegative, Positive, Settings
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run


class Elastic(Settings, frozen=True):
    """An elastic rollout pool: `elastic.max=4` turns it on, and the run begins with `rollout.replicas` engines."""

    min: Positive = 1
    max: Natural = 0
    """Most engines; 0 keeps `rollout.replicas` as it is."""
    grow_above: Fraction = 0.1
    """The pool grows when the trainer's share of waiting is this much larger than the engines'; half of it is enough
    while requests queue up in the engines."""
    shrink_above: Fraction = 0.2
    """It shrinks when the engines' share is this much larger than the trainer's."""
    queue_above: NonNegative = 0.5
    """Requests that wait in an engine, per running one, that count as a queue: the pool does not shrink into it."""
    interval_s: AboveZero = 10.0
    """Between two looks."""
    window: Positive = 3
    """Looks whose median is judged."""
    cooldown_s: NonNegative = 60.0
    """After the pool has reached a size, before it may be given another one."""
    join_timeout_s: AboveZero = 600.0
    """For a new engine to come: the cluster may have to start a machine for it. Then the pool stays as it is."""

    @property
    def on(self) -> bool:
        return self.max > 0

    def __post_init__(self) -> None:
        if self.on and self.min > self.max:
            raise ValueError(f"min={self.min} must not be above max={self.max}")


class Concurrency(Settings, frozen=True):
    """How many requests one engine is given at a time: `concurrency.adaptive=true` finds it for each of them."""

    adaptive: bool = False
    """Off: every admitted group goes to an engine at once, and waits there."""
    min: Positive = 8
    start: Positive = 64
    raise_by: Positive = 8
    """Added while an engine uses all that it may have and nothing waits in it."""
    lower_to: Fraction = 0.75
    """Factor when requests queue up in it, or were thrown out of its KV cache."""
    worth: Fraction = 0.02
    """Least relative gain in tokens per second for a raise to be followed by another one."""
    interval_s: AboveZero = 2.0
    """Between two looks."""


def check_pool(run: "Run") -> None:
    pool, replicas = run.elastic, run.rollout.replicas
    if pool.on and not pool.min <= replicas <= pool.max:
        raise ConfigError(
            f"rollout.replicas={replicas} is outside of elastic.min={pool.min} .. elastic.max={pool.max}, "
            "and the run begins with rollout.replicas engines"
        )
