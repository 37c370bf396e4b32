"""The contract of a stage.

    def stage(samples: list[Sample]) -> list[Sample | Drop]

One item back for each that came, in the same order: the sample as it is, `sample.rewarded(...)` with another reward, or
`Drop(reason)`. Samples come as they finish, so those of a group seldom come together. A group is trained on whole, so a
dropped sample ends its group; another takes its place.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from asyncrl.drop_reasons import DropReason
from asyncrl.types import Trajectory
from asyncrl.user_code.protocol import RewardFailure, attempt
from asyncrl.user_code.score import RULE, Rewarded, Score, read_score, rewarded

REASON = re.compile(r"[a-z0-9_]{1,40}")


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A finished sample with its reward."""

    prompt: str
    completion: str
    """What the reward got: the completion, or the model's last turn."""
    answer: str
    trajectory: Trajectory
    """Tokens, log-probabilities, versions, times."""
    turns: tuple[str, ...] = ()
    """The whole conversation, where there is an environment."""

    @property
    def reward(self) -> float:
        return self.trajectory.reward

    @property
    def parts(self) -> dict[str, float]:
        """Of the reward; empty where it is a number alone."""
        return self.trajectory.parts

    @property
    def tokens(self) -> int:
        """Sampled ones."""
        return self.trajectory.sampled_tokens

    @property
    def finished(self) -> bool:
        """Whether it came to its end by itself."""
        return self.trajectory.finish == "stop"

    def rewarded(self, reward: Rewarded) -> "Sample":
        """A number leaves the parts as they are, `{**sample.parts, "judge": 0.5}` adds one to them."""
        return msgspec.structs.replace(self, trajectory=rewarded(self.trajectory, reward))


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Not to be trained on; the ledger counts it under `stage:` and the reason."""

    reason: str

    def __post_init__(self) -> None:
        if not REASON.fullmatch(self.reason):
            raise ValueError(f"Drop({self.reason!r:.100}): a reason is a word such as too_long")


Verdict = Score | Drop
"""The reward that a sample leaves a stage with, or its end."""


def pass_through(function: Callable[..., Any], samples: Sequence[Sample]) -> list[Verdict] | RewardFailure:
    passed = attempt("stage", function, list(samples))
    if isinstance(passed, RewardFailure):
        return passed
    if not isinstance(passed, list) or len(cast(list[Any], passed)) != len(samples):
        return _invalid(passed, f"a stage returns a list with one item for each of its {len(samples)} samples")
    return _verdicts(cast(list[Any], passed))


def _verdicts(passed: list[Any]) -> list[Verdict] | RewardFailure:
    verdicts: list[Verdict] = []
    for item in passed:
        verdict = read_score(Score(item.reward, item.parts)) if isinstance(item, Sample) else item
        if not isinstance(verdict, Score | Drop):
            return _invalid(item, f"each item is a Sample with a finite reward, or Drop(reason); {RULE}")
        verdicts.append(verdict)
    return verdicts


def _invalid(value: object, rule: str) -> RewardFailure:
    return RewardFailure(DropReason.STAGE_INVALID, f"returned {value!r:.200}; {rule}")
