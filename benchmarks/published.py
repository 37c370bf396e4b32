"""Figures that others have published, and what the simulator makes of the same set-ups. Nothing is run but simulations.

verl: docs/advance/fully_async.md (18 October 2025), Qwen2.5-Math-7B, DAPO-Math-17k, 512 prompts x 16 answers of at most
28k tokens a step, 128 H20; shell/dapo_7b_math_fsdp2_64_64.sh for the engines' 4 GPUs. `step`, `gen` and `update_actor`
of its tables, in seconds.
NeMo-RL: arXiv 2604.26779, Qwen3-8B on 32 GB200, EAGLE-3 with 3 drafted tokens; asynchronous on 12 + 4 nodes of 4.
Stage times and acceptance lengths of its tables. Its projection to Qwen3-235B-A22B on GB200, in FP8, 4,096 completions
a step, is itself a simulation, with figures of the hardware that are not public.
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
    ExpertStep,
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
    """Others generate as far ahead as staleness allows: nobody keeps fewer groups ready for freshness."""
    return Run(
        steps=steps,
        max_staleness=staleness,
        staleness=control,
        rollout=Rollout(group_size=size, max_tokens=tokens),
        flow=Flow(groups_per_step=groups, groups_per_take=take, max_ready_groups=0, group_timeout_s=1e6),
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


# -- NeMo-RL's projection --------------------------------------------------------------------------------------------

PROJECTED = {(3, 3.0): (2.72, 1.70), (7, 5.0): (4.07, 1.96), (7, 8.0): (6.49, 2.22)}
"""Gains in generation and in the whole step, by drafted tokens and acceptance; the last is the best of their cells, to
which k=7 and all accepted fits."""
PROJECTED_ASYNC = (3.5, 2.5)
"""With five drafted tokens, an acceptance of 4, a lag of two versions and 2,048 GPUs."""
GENERATING = 0.65
"""Share of a step in generation, which is what their pairs of gains imply."""
BIG_LAYERS, BIG_HIDDEN, BIG_EXPERTS, BIG_ACTIVE, BIG_WIDTH, BIG_HEADS, BIG_KV = (
    94,
    4096,
    128,
    8,
    1536,
    64 * 128,
    4 * 128,
)
EXPERT_WEIGHTS = BIG_LAYERS * BIG_EXPERTS * 3 * BIG_HIDDEN * BIG_WIDTH
SHARED_WEIGHTS = BIG_LAYERS * 2 * BIG_HIDDEN * (BIG_HEADS + BIG_KV) + 151_936 * BIG_HIDDEN
"""Attention and output matrix."""
ACTIVE_WEIGHTS = SHARED_WEIGHTS + EXPERT_WEIGHTS * BIG_ACTIVE / BIG_EXPERTS
GB200_BYTES, GB200_FLOPS = 8.0e12, 5.0e15
"""Of one GPU; operations are FP8's."""
ENGINE_GPUS = 32
"""Assumed: experts are spread over so many."""
GENERATORS = 544
"""Of 2,048 GPUs in the asynchronous row; others are below."""


def projected(fixed: float, drafted: int = 0, accepted: float = 1.0, trainer: float = 0.0) -> Profile:
    """Weights and KV cache in FP8, a byte each. `fixed`: seconds of a step for collectives and kernels, the free
    parameter. Drafting itself costs nothing."""
    read, computed = ENGINE_GPUS * GB200_BYTES * MEMORY_USE, ENGINE_GPUS * GB200_FLOPS * COMPUTE_USE
    step = ExpertStep(
        experts=BIG_EXPERTS,
        active=BIG_ACTIVE,
        seconds=fixed + SHARED_WEIGHTS / read,
        all_experts=EXPERT_WEIGHTS / read,
        per_row=2 * ACTIVE_WEIGHTS / computed,
    )
    return Profile(
        lengths=LogNormal(median=4000, sigma=SIGMA, between=BETWEEN),
        engine=EngineCost(
            gpus=ENGINE_GPUS,
            max_batch=4096,
            step=step,
            per_context_token=2 * BIG_LAYERS * BIG_KV / read,
            speculation=Speculation(accepted=accepted, drafted=drafted),
        ),
        trainer=TrainerCost(per_step=trainer),
        reward=RewardCost(gather=0.0),
    )


def projected_step(profile: Profile, *, gpus: int, staleness: int) -> float:
    settings = run(512, 8, 32_000, 512, staleness, FixedStaleness(), 3 + 3 * staleness)
    return simulate(settings, profile, engines=gpus // ENGINE_GPUS, warm_up=3 * staleness).rates.step_seconds


def projected_lines() -> Iterator[Line]:
    """Gains, each over the same cluster without drafts."""

    def gain(fixed: float, drafted: int, accepted: float, trainer: float = 0.0, gpus: int = 512, lag: int = 0) -> float:
        both = projected(fixed, trainer=trainer), projected(fixed, drafted, accepted, trainer)
        plain, faster = (projected_step(profile, gpus=gpus, staleness=lag) for profile in both)
        return plain / faster

    (first, (wanted, _)), *_ = PROJECTED.items()
    shared = projected(0.0).engine.step.at(0)
    fitted = solve(projected, lambda p: gain(p.engine.step.at(0) - shared, *first), wanted, 1e-3, 2e-3)
    fixed = fitted.engine.step.at(0) - shared
    trainer = projected_step(fitted, gpus=512, staleness=0) * (1 / GENERATING - 1)
    for (drafted, accepted), (rollout, whole) in PROJECTED.items():
        what = f"NeMo-RL 235B, {drafted} drafted, {accepted:g} accepted"
        kind = "fitted" if (drafted, accepted) == first else "predicted"
        yield Line(f"{what}: gain in generation", rollout, gain(fixed, drafted, accepted), kind)
        yield Line(f"{what}: gain of a step", whole, gain(fixed, drafted, accepted, trainer), kind)
    what, rest = "NeMo-RL 235B async, 5 drafted, 4 accepted", 2048 - GENERATORS
    rollout, whole = (gain(fixed, 5, 4.0, t, GENERATORS, 2) for t in (0.0, trainer * 512 / rest))
    yield Line(f"{what}: gain in generation", PROJECTED_ASYNC[0], rollout, "predicted")
    yield Line(f"{what}: gain of a step", PROJECTED_ASYNC[1], whole, "fitted")
