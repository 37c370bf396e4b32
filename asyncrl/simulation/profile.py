"""What things cost: the numbers that a simulation rests on, and the lengths of completions that are drawn from them.

Costs are measured on a finished run (`calibration`) or written down. All times are seconds. A number that nobody knows
is better left at its default, which costs nothing, than guessed.

Lengths are fixed by seed, group and sample: every split of a cluster gets the same work. Recorded groups come in the
order in which they were recorded, again and again, so that a run with other settings generates the same completions.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.random import Generator
from numpy.typing import NDArray

from asyncrl.config.base import AboveZero, Fraction, Natural, NonNegative, Positive, Settings
from asyncrl.config.errors import explain, unknown_keys
from asyncrl.errors import ConfigError
from asyncrl.simulation.hardware import H100, H200, Reached
from asyncrl.simulation.shape import Shape

BLOCK = 512
"""Groups that are drawn together: a generator costs as much as a hundred draws."""


class LogNormal(Settings, frozen=True, tag_field="type", tag="lognormal"):
    """Completions as those of the fake engine: half of them are shorter than `median`, and the tail is long."""

    median: AboveZero = 16.0
    sigma: NonNegative = 0.8
    between: Fraction = 0.0
    """Share of the variance that lies between prompts: at 1 the completions of a group are equally long."""


class Fixed(Settings, frozen=True, tag_field="type", tag="fixed"):
    """Every completion has as many tokens."""

    tokens: Positive


class Recorded(Settings, frozen=True, tag_field="type", tag="recorded"):
    """Groups as they were in a run, one after the other: hard prompts stay hard for all their completions."""

    groups: Annotated[tuple[Annotated[tuple[Positive, ...], Meta(min_length=1)], ...], Meta(min_length=1)]
    """Lengths of the completions of each recorded group."""


class Affine(Settings, frozen=True, tag_field="type", tag="affine"):
    """A decoding step takes `seconds + per_row * rows`."""

    seconds: NonNegative = 0.0
    per_row: NonNegative = 0.0

    def at(self, rows: int) -> float:
        return self.seconds + self.per_row * rows


class Table(Settings, frozen=True, tag_field="type", tag="table"):
    """Seconds of a decoding step at some batch sizes; straight lines between them, and the last one goes on."""

    rows: Annotated[tuple[Positive, ...], Meta(min_length=1)]
    seconds: Annotated[tuple[AboveZero, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds):
            raise ValueError(f"rows has {len(self.rows)} numbers and seconds {len(self.seconds)}: one for each")
        if list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"rows={list(self.rows)} must rise")

    def at(self, rows: int) -> float:
        place = sum(known < rows for known in self.rows[:-1])
        if place == 0:
            return self.seconds[0]
        (left, right), (low, high) = self.rows[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(low, low + (high - low) * (rows - left) / (right - left))


def experts_read(active: int, experts: int, rows: int) -> float:
    """The part of a layer's experts that a step reads, if each row is sent to `active` of them at random."""
    return 1 - (1 - active / experts) ** rows


class ExpertStep(Settings, frozen=True, tag_field="type", tag="experts"):
    """A decoding step of a mixture of experts, which reads only the experts that a token of the batch is sent to.

    It takes `seconds + all_experts * share + per_row * rows`, with the share of `experts_read`.
    """

    experts: Positive
    """Of a layer."""
    active: Positive
    """Of a token."""
    seconds: NonNegative = 0.0
    """Of every step: reading what all tokens use (attention, output matrix), and what starting kernels takes."""
    all_experts: NonNegative = 0.0
    """Reading the experts of all layers."""
    per_row: NonNegative = 0.0
    """Computing one row: two operations for each of its active parameters."""

    def __post_init__(self) -> None:
        if self.active > self.experts:
            raise ValueError(f"active={self.active} is more than experts={self.experts}")

    def at(self, rows: int) -> float:
        share = experts_read(self.active, self.experts, rows)
        return self.seconds + self.all_experts * share + self.per_row * rows


class Roofline(Settings, frozen=True, tag_field="type", tag="roofline"):
    """A decoding step that reads weights and computes rows at the same time: the longer of the two counts, and what
    comes on top. `profile.hardware` and `profile.model` give all of it."""

    seconds: NonNegative = 0.0
    """Of every step: starting kernels, joining GPUs."""
    per_row: NonNegative = 0.0
    """Of each row: sampling, and what GPUs exchange of it."""
    read: NonNegative = 0.0
    """Reading the weights that all tokens use."""
    compute_row: NonNegative = 0.0
    """Computing one row."""
    experts: Natural = 0
    """Of a layer; they are read as in `experts`."""
    active: Natural = 0
    all_experts: NonNegative = 0.0
    """Reading the experts of all layers."""

    def __post_init__(self) -> None:
        if self.active > self.experts:
            raise ValueError(f"active={self.active} is more than experts={self.experts}")

    def at(self, rows: int) -> float:
        share = experts_read(self.active, self.experts, rows) if self.experts else 0.0
        read = self.read + self.all_experts * share
        return self.seconds + self.per_row * rows + max(read, self.compute_row * rows)


class Speculation(Settings, frozen=True):
    """Drafts: each step gives several tokens and takes longer."""

    accepted: Annotated[float, Meta(ge=1)] = 1.0
    """Tokens per step and completion, the policy's own included."""
    cost: Annotated[float, Meta(ge=1)] = 1.0
    """Time of a step that drafts and checks, relative to a plain one of the same batch."""
    drafted: Natural = 0
    """More than 0: each row is checked with so many drafted tokens, and `cost` is relative to a plain step of
    1 + `drafted` times as many rows. They cost arithmetic, and experts that are read besides."""
    up_to_batch: Natural = 0
    """Plain decoding with more rows than this; 0 always drafts."""


class EngineCost(Settings, frozen=True):
    """One engine."""

    gpus: Positive = 1
    """That one engine takes."""
    max_batch: Positive = 256
    """Completions decoded together; further ones wait in the engine."""
    step: Affine | Table | ExpertStep | Roofline = Affine()
    """A decoding step by the number of completions in it, without what their length adds."""
    per_context_token: NonNegative = 0.0
    """Added to a step for each token, given or sampled, that the completions in it have so far: reading the KV
    cache."""
    per_prefilled_token: NonNegative = 0.0
    """The engine stands still for it: each prompt, and all again after an update with on_update=recompute."""
    speculation: Speculation = Speculation()
    begin_seconds: NonNegative = 0.0
    """From a group's ticket to its first decoding step: the way to the engine, and what it prepares."""
    join_seconds: NonNegative = 0.0
    """From the request for a further engine until it serves: machine, model, weights."""


class TrainerCost(Settings, frozen=True):
    """The trainer."""

    gpus: Positive = 1
    """That it has unless a split is given."""
    per_token: NonNegative = 0.0
    """Seconds of one GPU for each sampled token that is trained on; more GPUs share it evenly."""
    active_parameters: NonNegative = 0.0
    """Instead of `per_token`, with `flops`: weights that a token uses, 6 operations each. Of a mixture of experts only
    the token's own."""
    flops: NonNegative = 0.0
    """Operations per second that one GPU reaches in training."""
    per_take: NonNegative = 0.0
    """Of each forward and backward, whatever its size."""
    per_step: NonNegative = 0.0
    """Of each update, and what else happens once a step."""
    per_ask: NonNegative = 0.0
    """Of asking the buffer for groups, even if they are there. It counts as waiting."""
    token_budget: Positive = 8192
    """As in a run; with `hardware`, each batch of so many tokens costs its collectives."""
    context_parallel: Positive = 1
    """As in a run, and so is `expert_parallel`."""
    expert_parallel: Positive = 1
    recompute: bool = True
    """Activations are computed again in the backward: one forward more."""
    forwards: Natural = 0
    """Further forwards of every batch, as of a reference model."""

    def __post_init__(self) -> None:
        if bool(self.active_parameters) != bool(self.flops):
            raise ValueError("active_parameters and flops go together: set both, or none")
        if self.per_token and self.flops:
            raise ValueError("per_token is what active_parameters / flops would say: set one of them")

    @property
    def token_seconds(self) -> float:
        return 6 * self.active_parameters / self.flops if self.flops else self.per_token


class SyncCost(Settings, frozen=True):
    """A weight update."""

    seconds: NonNegative = 0.0
    """From the update until every engine serves it."""
    pause: NonNegative = 0.0
    """The last part of it, in which engines stand still."""

    def __post_init__(self) -> None:
        if self.pause > self.seconds:
            raise ValueError(f"pause={self.pause:g} is a part of seconds={self.seconds:g} and cannot be more")


class RewardCost(Settings, frozen=True):
    """From the last token of a completion until it is in the buffer."""

    gather: NonNegative | None = None
    """Finished completions of one engine wait this long for others; none: as in a run, longer with many engines."""
    seconds: NonNegative = 0.0
    """Of one worker for one completion; `reward.workers` of the run share them."""
    latency: NonNegative = 0.0
    """Of the way there."""


class Sharing(Settings, frozen=True):
    """Trainer and engines on the cores of one machine, or on one card: each is slower while the other is at work. For
    `--gpus`, where everybody has GPUs of their own, it does not count."""

    trainer: NonNegative = 0.0
    """Added to a forward and backward, as a share of its time, for each engine that decodes meanwhile."""
    engine: NonNegative = 0.0
    """Added to a decoding step, as a share of its time, while the trainer is in a forward and backward."""


class Profile(Settings, frozen=True):
    """Everything that is not in the run's own settings."""

    lengths: LogNormal | Fixed | Recorded = LogNormal()
    """Sampled tokens of a completion; `rollout.max_tokens` of the run cuts it."""
    prompt_tokens: Natural = 0
    engine: EngineCost = EngineCost()
    trainer: TrainerCost = TrainerCost()
    sync: SyncCost = SyncCost()
    reward: RewardCost = RewardCost()
    sharing: Sharing = Sharing()
    informative: Fraction = 1.0
    """Share of the groups whose rewards differ. The trainer computes nothing for the others."""
    kl_per_version: NonNegative = 0.0
    """Mismatch KL for each version of age, which is what `staleness=ess` and `kl` watch."""
    hardware: H100 | H200 | None = None
    """With it ranks and their collectives cost what `asyncrl.simulation.ranks` says, and so does what has no number of
    its own: the engine's step, the trainer's tokens, weight updates."""
    reached: Reached = Reached()
    model: Shape | None = None
    """Needed with `hardware`."""
    source: str = ""
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        if self.hardware is None:
            return
        if self.model is None:
            raise ValueError("hardware says how fast machines are, and model is missing: give its sizes")
        if (experts := self.model.experts or 1) % (degree := self.trainer.expert_parallel):
            raise ValueError(f"trainer.expert_parallel={degree} does not divide the {experts} experts of the model")


def convert(raw: Mapping[str, Any]) -> Profile:
    """A checked profile, or ConfigError with the path of what is wrong."""
    if unknown := unknown_keys(raw, Profile):
        raise ConfigError("\n".join(f"profile: {sentence}" for sentence in unknown))
    try:
        return msgspec.convert(raw, Profile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"profile: {explain(error, raw, Profile)}") from None


def read(path: Path) -> dict[str, Any]:
    """A profile as it stands in a file, not yet checked."""
    try:
        raw = msgspec.yaml.decode(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a profile, or give --from RUN to measure one") from None
    except (msgspec.DecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is not a profile: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a profile: it holds no settings")
    return raw


def to_yaml(profile: Profile) -> bytes:
    """What differs from the defaults; `convert` gives the same profile back."""
    return msgspec.yaml.encode(msgspec.to_builtins(profile))


class Answers:
    """Draws the groups of a run."""

    def __init__(self, profile: Profile, *, seed: int, group_size: int, max_tokens: int) -> None:
        self._lengths, self._informative = profile.lengths, profile.informative
        self._seed, self._group_size, self._max_tokens = seed, group_size, max_tokens
        self._block = cache(self._draw)

    def of(self, group: int) -> tuple[list[int], bool]:
        """Tokens of each completion, and whether their rewards differ."""
        lengths, informative = self._block(group // BLOCK)
        return lengths[group % BLOCK], informative[group % BLOCK]

    def some(self) -> list[int]:
        """Lengths of the first completions."""
        return [length for group in self._block(0)[0] for length in group]

    def _draw(self, block: int) -> tuple[list[list[int]], list[bool]]:
        rng = np.random.default_rng((self._seed, block))
        informative = rng.random(BLOCK) < self._informative
        drawn = _draw(self._lengths, rng, self._group_size, block * BLOCK)
        return np.clip(drawn, 1, self._max_tokens).astype(int).tolist(), informative.tolist()


def _draw(lengths: LogNormal | Fixed | Recorded, rng: Generator, size: int, first: int) -> NDArray[np.float64]:
    """One row a group, from the `first` of the block on."""
    match lengths:
        case Fixed(tokens=tokens):
            return np.full((BLOCK, size), float(tokens))
        case LogNormal(median=median, sigma=sigma, between=between):
            prompt, own = rng.standard_normal((BLOCK, 1)), rng.standard_normal((BLOCK, size))
            return np.round(median * np.exp(sigma * (np.sqrt(between) * prompt + np.sqrt(1 - between) * own)))
        case Recorded(groups=groups):
            chosen = [groups[i % len(groups)] for i in range(first, first + BLOCK)]
            return np.array([row if len(row) == size else rng.choice(row, size) for row in chosen], np.float64)
