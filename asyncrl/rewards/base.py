"""What is asked of a reward function and what comes back, in the parent and on the wire to its worker."""

import msgspec

from asyncrl.rewards.score import Score


class RewardInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The arguments of one call."""

    prompt: str
    completion: str
    answer: str
    turns: tuple[str, ...] = ()
    """The whole conversation, where there is an environment; `completion` is the model's last turn then."""


class RewardFailure(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A sample without a reward: it is dropped and counted under its reason."""

    reason: str
    """`reward_timeout`, `reward_error` or `reward_invalid`, and the same of an environment or a stage."""
    message: str


class RewardStats(msgspec.Struct, kw_only=True):
    """Counters since start."""

    judged: int = 0
    busy_seconds: float = 0.0
    """In which workers judged, added up over the workers."""
    waited_seconds: float = 0.0
    """From being handed over to the reward, added up over the samples: waiting for a worker and being judged."""

    def add(self, samples: int, came: float, begun: float, ended: float) -> None:
        """A share that came, was begun by a worker and ended at these moments."""
        self.judged += samples
        self.busy_seconds += ended - begun
        self.waited_seconds += samples * (ended - came)


ALLOW_UNSAFE_EXEC = "ASYNCRL_ALLOW_UNSAFE_EXEC"
"""In a worker's environment: programs may run outside a sandbox. It is there by reward.allow_unsafe_exec alone."""
RewardResult = float | Score | RewardFailure
"""A number where the reward has no parts."""
