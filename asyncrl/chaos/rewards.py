"""A user's reward function that fails now and then, by the content of the sample and a seed."""

import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from asyncrl.system.user_functions import find_function as find_function

NAN_RATE = 0.01
"""Of single samples; each costs its whole group."""
SLOW_SAMPLES = 12
"""In a whole run: each holds up a worker until reward.timeout_s is over."""
HOURS = 3600.0

Reward = Callable[[str, str, str], object]


def faulty(inner: Reward, seed: int, *, slow: float, nan: float) -> Reward:
    """`inner`, but for a share `slow` of the samples it hangs, and for a share `nan` it is not a number."""

    def reward(prompt: str, completion: str, answer: str) -> object:
        dice = xxhash.xxh3_64_intdigest(f"{prompt}\0{completion}".encode(), seed=seed) / 2**64
        if dice < slow:
            time.sleep(HOURS)
        if dice > 1 - nan:
            return float("nan")
        return inner(prompt, completion, answer)

    return reward


def write_wrapper(path: Path, location: str, seed: int, kinds: list[str], samples: int) -> str:
    """A module that names the faulty function, for the reward.function of a run of so many samples."""
    slow = min(0.01, SLOW_SAMPLES / samples) if "slow_reward" in kinds else 0.0
    nan = NAN_RATE if "nan_reward" in kinds else 0.0
    path.write_text(
        "from asyncrl.chaos.rewards import faulty, find_function\n\n"
        f"reward = faulty(find_function({location!r}), {seed}, slow={slow}, nan={nan})\n"
    )
    return f"{path}:reward"
