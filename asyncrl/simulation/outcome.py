"""What a simulation found, and how it is added up."""

from collections.abc import Sequence

import msgspec


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over the steps after the warm-up."""

    seconds: float
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    """Trained on."""
    generated_tokens_per_second: float
    trainer_wait: float
    """Share of the time that the trainer waited for groups; `trainer_wait_fraction` of a real run."""
    wait_seconds: float
    """The same per step: exposed generation."""
    rollout_idle: float
    """Share of the engines' time without a single completion."""
    batch_mean: float
    """Completions decoded together by an engine that is not idle."""
    staleness_mean: float
    staleness_max: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run. Nothing here was measured."""

    simulated: bool = True
    engines: int
    """At the end, where the pool is elastic."""
    rollout_gpus: int
    trainer_gpus: int
    steps: int
    rates: Rates
    dropped: dict[str, int]
    """Samples, by reason, over the whole simulation."""
    waste: dict[str, int]
    """Tokens sampled for them."""
    publications: int
    short_of_memory: bool
    """Whether `buffer.max_bytes` kept groups from being admitted."""
    resizes: tuple[str, ...] = ()
    """What the elastic pool decided, with the second and the reason."""

    @property
    def gpus(self) -> int:
        return self.rollout_gpus + self.trainer_gpus


class Step(msgspec.Struct, frozen=True):
    """One optimizer step."""

    waited: float
    samples: int
    tokens: int
    staleness_sum: int
    staleness_max: int


class Meter(msgspec.Struct, frozen=True):
    """Counters of all engines, and the seconds that they were there."""

    time: float
    engine_seconds: float
    busy_seconds: float
    row_seconds: float
    generated: float


def share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def rates(steps: Sequence[Step], begin: Meter, end: Meter) -> Rates:
    seconds = end.time - begin.time
    samples = sum(step.samples for step in steps)
    waited = sum(step.waited for step in steps)
    busy = end.busy_seconds - begin.busy_seconds
    return Rates(
        seconds=seconds,
        step_seconds=seconds / len(steps),
        samples_per_second=share(samples, seconds),
        tokens_per_second=share(sum(step.tokens for step in steps), seconds),
        generated_tokens_per_second=share(end.generated - begin.generated, seconds),
        trainer_wait=share(waited, seconds),
        wait_seconds=waited / len(steps),
        rollout_idle=max(0.0, 1 - share(busy, end.engine_seconds - begin.engine_seconds)),
        batch_mean=share(end.row_seconds - begin.row_seconds, busy),
        staleness_mean=share(sum(step.staleness_sum for step in steps), samples),
        staleness_max=max(step.staleness_max for step in steps),
    )
