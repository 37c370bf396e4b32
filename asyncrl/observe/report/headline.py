"""One sentence: what bounds a run, the figures that show it, and the setting to change.

Pure: from figures to words. Where the time went is found by `asyncrl.observe.report.time_breakdown`.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from asyncrl.drop_reasons import DropReason, describe

Bound = Literal["generation", "tail", "reward", "training", "sync", "stale", "checkpoint", "other", "nothing"]
STALE_FROM = 0.2
"""Of the sampled tokens: from here on drops bound a run whose trainer waits for data."""
WAITS_FROM = 0.1
"""Of the loop: a trainer that waits less is not held up."""
TELL_FROM = 0.1
"""Of the sampled tokens: drops for other reasons that are told beside."""
IDLE_FROM = 0.1
"""Of the engines' time: less is no reason to change anything."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What the sentence is made of. Shares are of the loop's time, or of the tokens sampled, between 0 and 1."""

    steps: int
    loop_seconds: float
    shares: dict[str, float]
    """By cause, of the loop's time."""
    drops: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """By reason, of the tokens sampled."""
    engines: int = 1
    engines_idle: float = 0.0
    """Of their time in the loop, mean over the engines: no completion was generated."""
    running_most: float = 0.0
    running_tail: float = 0.0
    """Completions that ran on average while the trainer waited for the tail."""
    tokens_median: float = 0.0
    tokens_longest: float = 0.0
    reward_seconds: float = 0.0
    """From a finished completion to its reward, on average."""
    reward_judging: float = 0.0
    """Completions that were with the reward function at a time, on average."""
    reward_workers: int = 1
    reward_busy: float = 0.0
    """Of the workers' time."""
    judge_concurrency: int = 0
    """Where most of the wait for rewards is for a judge: completions that are with it at a time; else 0."""
    sync_seconds: float = 0.0
    """For one version, on average."""
    step_seconds: float = 0.0
    staleness_max: float = 0.0
    max_staleness: int = 0
    waiting: float = 0.0
    """Completions that were queued in the engines, on average."""
    ranks: int = 1
    on_gpu: bool = False
    drafting: bool = False
    one_process: bool = False
    """All actors share it: their times add up."""
    transport: str = "auto"


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    bound: Bound
    sentence: str
    """What bounds the run, in numbers."""
    advice: str
    """What to change, in settings."""
    beside: tuple[str, ...] = ()
    """What else is worth knowing."""


def headline(figures: Figures) -> Headline:
    if not figures.steps or figures.loop_seconds <= 0:
        return Headline(
            bound="nothing", sentence="No step is finished yet, so nothing can be said about what bounds the run.",
            advice="",
        )  # fmt: skip
    bound = _bound(figures)
    sentence, advice = _WORDS[bound](figures)
    return Headline(bound=bound, sentence=sentence, advice=advice, beside=tuple(_beside(figures, bound)))


def _bound(figures: Figures) -> Bound:
    shares = figures.shares
    waits = sum(shares.get(cause, 0.0) for cause in ("generation", "tail", "reward"))
    if figures.drops.get(DropReason.STALE, 0.0) >= STALE_FROM and waits >= WAITS_FROM:
        return "stale"
    known: tuple[Bound, ...] = ("generation", "tail", "reward", "training", "sync", "checkpoint", "other")
    return max(known, key=lambda bound: shares.get(bound, 0.0))


def _generation(f: Figures) -> tuple[str, str]:
    many = f"{f.engines} engines" if f.engines > 1 else "the one engine"
    sentence = (
        f"Generation bounds this run: for {_share(f, 'generation')} of the time the trainer waited for completions "
        f"while {many} generated (up to {f.running_most:.0f} at a time)."
    )
    ways = [f"add engines (rollout.replicas={f.engines + 1})"]
    if f.waiting >= 1:
        ways.insert(0, f"give engines larger batches (engine.max_batch; {f.waiting:.0f} completions were queued)")
    if f.engines_idle >= IDLE_FROM:
        ways.append(
            f"let generation run further ahead (max_staleness={f.max_staleness + 1}; engines idled "
            f"{f.engines_idle:.0%} of the time)"
        )
    if not f.drafting:
        ways.append("draft tokens (drafter=eagle3)")
    return sentence, _or(ways)


def _tail(f: Figures) -> tuple[str, str]:
    sentence = (
        f"The long tail bounds this run: for {_share(f, 'tail')} of the time the trainer waited for the last "
        f"completions, {f.running_tail:.1f} at a time where {f.running_most:.0f} fit; the longest completion has "
        f"{f.tokens_longest:,.0f} tokens, the median {f.tokens_median:,.0f}."
    )
    return sentence, _or(
        [
            f"let others be generated beside the long ones (max_staleness={f.max_staleness + 1})",
            "shorten the longest (rollout.max_tokens, algorithm.overlong)",
            *([] if f.drafting else ["draft tokens, which pays most in small batches (drafter=eagle3)"]),
        ]
    )


def _reward(f: Figures) -> tuple[str, str]:
    who = "judge" if f.judge_concurrency else "reward function"
    sentence = (
        f"The {who} bounds this run: for {_share(f, 'reward')} of the time the trainer waited for rewards; a "
        f"finished completion waited {_seconds(f.reward_seconds)} for its reward, {f.reward_judging:.0f} at a time."
    )
    if f.judge_concurrency:
        more = f"reward.judge.concurrency={2 * f.judge_concurrency} instead of {f.judge_concurrency}"
        return sentence, _or([f"ask about more completions at a time ({more})", "use a faster judge"])
    return sentence, _or(
        [
            f"judge more completions at a time (reward.workers={2 * f.reward_workers} instead of {f.reward_workers}, "
            f"busy {f.reward_busy:.0%} of the time)",
            "make the reward function faster",
        ]
    )


def _training(f: Figures) -> tuple[str, str]:
    sentence = (
        f"Training bounds this run: the trainer computed for {_share(f, 'training')} of the time, "
        f"{_seconds(f.step_seconds * f.shares.get('training', 0.0))} a step, and waited for data {_waits(f):.0%}; "
        f"engines idled {f.engines_idle:.0%} of theirs."
    )
    faster = f"train on more GPUs (trainer.ranks={2 * f.ranks})" if f.on_gpu else "give the trainer more threads"
    ways = [faster if f.on_gpu else f"{faster} (trainer.threads) or a GPU (trainer.device=cuda)"]
    if f.on_gpu:
        ways.append("pack larger batches (trainer.token_budget)")
    if f.engines > 1 and f.engines_idle > 1 / f.engines:
        ways.append(f"save an engine, the rest keep up (rollout.replicas={f.engines - 1})")
    return sentence, _or(ways)


def _sync(f: Figures) -> tuple[str, str]:
    sentence = (
        f"Weight sync bounds this run: for {_share(f, 'sync')} of the time the trainer waited for a weight update, "
        f"{_seconds(f.sync_seconds)} for a version where a step takes {_seconds(f.step_seconds)}."
    )
    ways = ["publish less often (staleness=ess)"]
    if f.transport == "file":
        ways.insert(0, f"leave the disk (weights.transport={'nccl' if f.on_gpu else 'auto'})")
    if f.transport in ("file", "nccl"):
        ways.append("send only what changed (weights.delta=true)")
    ways.append("make steps larger (flow.groups_per_step), so that each sync serves more samples")
    return sentence, _or(ways)


def _stale(f: Figures) -> tuple[str, str]:
    dropped = f.drops[DropReason.STALE]
    sentence = (
        f"Stale drops bound this run: {dropped:.0%} of the sampled tokens were dropped because they had become too old "
        f"(max_staleness={f.max_staleness}), while the trainer waited {_waits(f):.0%} of the time for data."
    )
    return sentence, _or(
        [
            f"allow older samples (max_staleness={f.max_staleness + 1}, with a correction)",
            "shorten the longest completions, which age most (rollout.max_tokens)",
        ]
    )


def _checkpoint(f: Figures) -> tuple[str, str]:
    sentence = f"Checkpoints bound this run: the trainer wrote them for {_share(f, 'checkpoint')} of the time."
    return sentence, "To make it faster, write them less often (checkpoint.every)."


def _other(f: Figures) -> tuple[str, str]:
    sentence = (
        f"Nothing that is measured bounds this run: for {_share(f, 'other')} of the time the trainer neither computed "
        f"nor waited for completions, rewards or weights; steps of {_seconds(f.step_seconds)} are short beside the "
        "calls between actors."
    )
    return sentence, _or(
        ["make steps larger (flow.groups_per_step)", "take more groups at a time (flow.groups_per_take)"]
    )


_WORDS: Mapping[str, Callable[[Figures], tuple[str, str]]] = {
    "generation": _generation,
    "tail": _tail,
    "reward": _reward,
    "training": _training,
    "sync": _sync,
    "stale": _stale,
    "checkpoint": _checkpoint,
    "other": _other,
}


def _beside(f: Figures, bound: Bound) -> list[str]:
    found = [
        f"{share:.0%} of the sampled tokens were dropped as {reason}: {describe(reason).meaning}."
        for reason, share in sorted(f.drops.items(), key=lambda item: -item[1])
        if share >= TELL_FROM and reason != bound
    ]
    if f.one_process:
        found.append("All actors share one process (cluster=inprocess), so what one computes another waits for.")
    elif bound == "training" and f.engines_idle < IDLE_FROM and _waits(f) < WAITS_FROM:
        found.append("Engines and trainer keep pace with each other: this run is balanced.")
    return found


def _waits(f: Figures) -> float:
    return sum(f.shares.get(cause, 0.0) for cause in ("generation", "tail", "reward"))


def _share(f: Figures, cause: str) -> str:
    return f"{f.shares.get(cause, 0.0):.0%}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _or(ways: list[str]) -> str:
    return "To make it faster, " + (", or ".join(["; ".join(ways[:-1]), ways[-1]]) if len(ways) > 1 else ways[0]) + "."
