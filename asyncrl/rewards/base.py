"""What is asked of a reward function and what comes back, in the parent and on the wire to its worker."""

from typing import Literal

import msgspec


class RewardInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The arguments of one call."""

    prompt: str
    completion: str
    answer: str


class RewardFailure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sample without a reward: it is dropped and counted under its reason."""

    reason: Literal["reward_timeout", "reward_error", "reward_invalid"]
    message: str


ALLOW_UNSAFE_EXEC = "ASYNCRL_ALLOW_UNSAFE_EXEC"
"""In a worker's environment: programs may run outside a sandbox. It is there by reward.allow_unsafe_exec alone."""
RewardResult = float | RewardFailure
