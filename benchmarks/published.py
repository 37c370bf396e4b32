"""Figures that others have published, and what the simulator makes of the same set-ups. Nothing is run but simulations.

verl: docs/advance/fully_async.md (18 October 2025), Qwen2.5-Math-7B, DAPO-Math-17k, 512 prompts x 16 answers of at most
28k tokens a step, 128 H20; shell/dapo_7b_math_fsdp2_64_64.sh for the engines' 4 GPUs. `step`, `gen` and `update_actor`
of its tables, in seconds.
NeMo-RL: arXiv 2604.26779, Qwen3-8B on 32 GB200, EAGLE-3 with 3 drafted tokens; asynchronous on 12 + 4 nodes of 4.
Stage times and acceptance lengths of its tables.
"""

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import NamedTuple

import msgspec

from asyncrl.config import Buffer, Flow, Rollout, Run
from asyncrl.config.staleness import EssBand, FixedStaleness, StalenessControl
from asyncrl.simulation.loop import simulate
from asyncrl.simulation.outcome import Rates
from asyncrl.simulation.profile import (
    Affine,
    Answers,
    EngineCost,
    LogNormal,
    Profile,
    RewardCost,
    Speculation,
    SyncCost,
    Table,
    TrainerCost,
)


class Line(NamedTuple):
    """One figure."""

    what: str
    published: float
    simulated: float
    kind: str
    """`input`: used as it is; `fitted`: the free parameter was chosen to meet it; `predicted`."""
    least: float = 0.0
    """Errors of figures below it are relative to it."""

    @property
    def error(self) -> float:
        return (self.simulated - self.published) / max(self.published, self.least)


def solve(
    make: Callable[[float], Profile], seconds: Callable[[Profile], float], wanted: float, low: float, high: float
) -> Profile:
    """The profile whose time is `wanted`; times are nearly linear in the parameter, so three secants are enough."""
    at_low, at_high = seconds(make(low)), seconds(make(high))
    for _ in range(2):
        middle = low + (high - low) * (wanted - at_low) / (at_high - at_low)
        low, high, at_low, at_high = high, middle, at_high, seconds(make(middle))
        if abs(at_high - wanted) < 0.005 * wanted:
            break
    return make(high)


def run(groups: int, size: int, tokens: int, take: int, staleness: int, control: StalenessControl, steps: int) -> Run:
    return Run(
        steps=steps,
        max_staleness=staleness,
        staleness=control,
        rollout=Rollout(group_size=size, max_tokens=tokens),
        flow=Flow(groups_per_step=groups, groups_per_take=take, group_timeout_s=1e6),
        buffer=Buffer(max_bytes=1 << 45),
    )


# -- verl ------------------------------------------------------------------------------------------------------------

VERL_SYNC = {"step": 356.30, "gen": 177.85}
VERL_STREAM = {"step": 231.34, "gen": 128.47}
VERL_STALE = {0.5: {"step": 150.63, "gen": 33.14}, 0.3: {"step": 146.11, "gen": 38.88}}
"""By staleness_threshold, with partial rollouts."""
VERL_UPDATE = fmean((98.77, 109.12, 103.22, 113.16))
"""update_actor on 64 GPUs, of the four rows; one figure for all simulations."""
VERL_OTHER = fmean((231.34 - 128.47 - 98.77, 150.63 - 33.14 - 113.16))
"""What is left of a step: new weights."""
PARAMETERS, LAYERS, KV_WIDTH = 7.62e9, 28, 4 * 128
"""Of Qwen2.5-Math-7B."""
H20_BYTES, H20_FLOPS = 4.0e12, 148e12
MEMORY_USE, COMPUTE_USE, TRAINING_USE = 0.7, 0.5, 0.4
"""Assumed: shares of the card's figures that decoding and training reach."""
ANSWER = VERL_UPDATE * 64 * H20_FLOPS * TRAINING_USE / (6 * PARAMETERS) / (512 * 16)
"""Mean tokens of an answer with its prompt, from the time of training: lengths are not published."""
PROMPT, SIGMA, BETWEEN = 150, 1.0, 0.5
"""Assumed."""


def verl(floor: float, mean: float) -> Profile:
    """`floor`: seconds of a decoding step with few rows on 4 GPUs, the free parameter."""
    per_row = 2 * PARAMETERS / (4 * H20_FLOPS * COMPUTE_USE)
    knee = max(2, int(floor / per_row))
    lengths = LogNormal(median=mean / 1.65, sigma=SIGMA, between=BETWEEN)  # exp(sigma^2 / 2)
    return Profile(
        lengths=lengths,
        prompt_tokens=PROMPT,
        engine=EngineCost(
            gpus=4,
            max_batch=1024,
            step=Table(rows=(1, knee, 1024), seconds=(floor, floor, max(floor, 1024 * per_row))),
            per_context_token=2 * 2 * LAYERS * KV_WIDTH / (4 * H20_BYTES * MEMORY_USE),
        ),
        trainer=TrainerCost(gpus=64, per_token=64 * VERL_UPDATE / (512 * 16 * _mean(lengths))),
        sync=SyncCost(seconds=VERL_OTHER, pause=VERL_OTHER),
        reward=RewardCost(gather=0.0),
    )


def _mean(lengths: LogNormal) -> float:
    drawn = Answers(Profile(lengths=lengths), seed=0, group_size=16, max_tokens=28 * 1024)
    return fmean(length for group in range(512) for length in drawn.of(group)[0])


def verl_generation(profile: Profile) -> float:
    """Of the synchronous baseline: all 128 GPUs generate, and wait for the last answer."""
    alone = msgspec.structs.replace(profile, trainer=TrainerCost(), sync=SyncCost())
    return simulate(run(512, 16, 28 * 1024, 512, 0, FixedStaleness(), 3), alone, engines=32).rates.step_seconds


def verl_stream(profile: Profile) -> Rates:
    settings = run(512, 16, 28 * 1024, 128, 0, FixedStaleness(), 4)
    return simulate(settings, profile, engines=16, trainer_gpus=64).rates


def verl_stale(profile: Profile, threshold: float) -> float:
    """A step of verl is four updates of 128 prompts and one publication; `threshold` of them may be ahead.

    Nothing drifts in the simulation, so the controller climbs to its loosest rung, four updates a publication.
    """
    settings = run(128, 16, 28 * 1024, 128, round(3 + 4 * threshold), EssBand(window=1, publish_every_max=4), 40)
    return 4 * simulate(settings, profile, engines=16, trainer_gpus=64, warm_up=24).rates.step_seconds


def verl_lines(scale: float = 1.0) -> Iterator[Line]:
    """`scale`: times the mean answer that training time tells."""
    mean = (ANSWER - PROMPT) * scale
    profile = solve(lambda floor: verl(floor, mean), verl_generation, VERL_SYNC["gen"], 4e-3, 7e-3)
    yield Line("verl, synchronous: generation", VERL_SYNC["gen"], verl_generation(profile), "fitted")
    stream = verl_stream(profile)
    yield Line("verl, streaming: step", VERL_STREAM["step"], stream.step_seconds, "predicted")
    yield Line("verl, streaming: gain", 1.6, VERL_SYNC["step"] / stream.step_seconds, "predicted")
    steps = {threshold: verl_stale(profile, threshold) for threshold in VERL_STALE}
    for threshold, step in steps.items():
        published = VERL_STALE[threshold]["step"]
        yield Line(f"verl, staleness {threshold} and partial: step", published, step, "predicted")
    yield Line("verl, staleness 0.5 and partial: gain", 2.35, VERL_SYNC["step"] / steps[0.5], "predicted")


# -- NeMo-RL ---------------------------------------------------------------------------------------------------------

OTHER = {"Think": 0.3 + 2.1 + 17.9 + 31.4, "Zero": 0.2 + 1.9 + 17.8 + 31.3}
"""data, prepare, logprob and train of a step without drafts."""
GENERATION = {"Think": 133.6, "Zero": 100.0}
STEP = {"Think": (185.3, 137.4), "Zero": (151.2, 107.5)}
"""Without and with drafts."""
ACCEPTED = {"Think": 2.77, "Zero": 3.32}
WEAKER = {"Think": (2.40, 1.19), "Zero": (2.88, 1.51)}
"""Acceptance and gain in generation of a drafter that was trained on other data."""
DRAFTING = ACCEPTED["Zero"] / (GENERATION["Zero"] / 56.6)
"""Time of a step that checks three drafted tokens, relative to a plain one: fitted on RL-Zero's generation."""
ASYNC = (75.0, 60.5)
ASYNC_TRAINER = 75.0 - 10.4
"""The step without drafts less its exposed generation."""


def nemo(pace: float, trainer: float, accepted: float = 1.0) -> Profile:
    """Batch and lengths are not published: 384 prompts x 4 answers, log-normal. `pace` makes the time right."""
    drafts = Speculation(accepted=accepted, cost=DRAFTING if accepted > 1 else 1.0)
    return Profile(
        lengths=LogNormal(median=4000, sigma=SIGMA, between=BETWEEN),
        engine=EngineCost(step=Affine(seconds=pace), max_batch=512, speculation=drafts),
        trainer=TrainerCost(per_step=trainer),
        reward=RewardCost(gather=0.0),
    )


def nemo_step(profile: Profile, *, engines: int, staleness: int) -> float:
    settings = run(384, 4, 32_000, 384, staleness, FixedStaleness(), 6)
    return simulate(settings, profile, engines=engines, warm_up=3 * staleness).rates.step_seconds


def nemo_lines() -> Iterator[Line]:
    for name, others in OTHER.items():
        profile = solve(
            lambda pace: nemo(pace, 0.0), lambda p: nemo_step(p, engines=32, staleness=0), GENERATION[name], 2e-3, 8e-3
        )
        pace = profile.engine.step.at(1)
        plain, drafted = (
            nemo_step(nemo(pace, others, accepted), engines=32, staleness=0) for accepted in (1.0, ACCEPTED[name])
        )
        yield Line(f"NeMo-RL {name}: step", STEP[name][0], plain, "input")
        kind = "predicted" if name == "Think" else "fitted"
        yield Line(f"NeMo-RL {name}: step with drafts", STEP[name][1], drafted, kind)
        accepted, gain = WEAKER[name]
        weaker = nemo_step(nemo(pace, 0.0, accepted), engines=32, staleness=0)
        yield Line(f"NeMo-RL {name}: gain in generation, weaker drafter", gain, GENERATION[name] / weaker, "predicted")
    profile = solve(
        lambda pace: nemo(pace, ASYNC_TRAINER), lambda p: nemo_step(p, engines=48, staleness=1), ASYNC[0], 2e-3, 4e-3
    )
    yield Line("NeMo-RL Think, asynchronous: step", ASYNC[0], nemo_step(profile, engines=48, staleness=1), "fitted")
    drafted = nemo(profile.engine.step.at(1), ASYNC_TRAINER, ACCEPTED["Think"])
    found = nemo_step(drafted, engines=48, staleness=1)
    yield Line("NeMo-RL Think, asynchronous: step with drafts", ASYNC[1], found, "predicted")
