"""A reward with named parts: what a function of the user's may return, and what a trajectory keeps of it.

    return {"correct": 1.0, "format": 0.2}                          # the reward is their sum
    return Score(0.7, {"correct": 1.0, "tokens": 341.0})            # the reward is 0.7, whatever its parts are

What is learned from is the total; the parts are recorded and shown beside it.
"""

from typing import TYPE_CHECKING, Any, cast

import msgspec

from asyncrl.data.reward_parts import MOST, Parts, checked, finite

if TYPE_CHECKING:  # a worker that only judges needs no arrays
    from asyncrl.types import Trajectory

RULE = (
    f"a reward must be a finite number, or 1 to {MOST} of them as a dict, under names of up to 40 small letters, "
    "digits and _"
)


class Score(msgspec.Struct, frozen=True, tag=True):
    """A total that need not be the sum of its parts."""

    total: float
    parts: Parts = {}

    @classmethod
    def of(cls, parts: Parts) -> "Score":
        return cls(sum(map(float, parts.values())), parts)


Rewarded = float | Parts | Score
"""What a reward function returns."""


def read_score(value: object) -> Score | None:
    """What was returned, in plain numbers; None where it is no reward."""
    if isinstance(value, dict):
        parts = checked(cast(Any, value))
        return _score(sum(parts.values()), parts) if parts else None
    return _score(value.total, checked(value.parts)) if isinstance(value, Score) else _score(value, {})


def _score(total: object, parts: Parts | None) -> Score | None:
    number = finite(total)
    return None if number is None or parts is None else Score(number, parts)


def rewarded(trajectory: "Trajectory", reward: Rewarded) -> "Trajectory":
    """With another reward, whatever it is; a number alone leaves the parts as they are."""
    if isinstance(reward, dict):
        reward = Score.of(reward)
    if isinstance(reward, Score):
        return msgspec.structs.replace(trajectory, reward=reward.total, parts=reward.parts)
    return msgspec.structs.replace(trajectory, reward=reward)
