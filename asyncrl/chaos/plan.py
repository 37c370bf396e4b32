"""Which faults hit whom and when: a pure function of the seed."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from asyncrl.config import Run
from asyncrl.errors import ConfigError

DRIVER = "driver"
SIGNALS = ("kill", "stop", "segv")
KINDS = {
    "kill": "kill -9 of a process",
    "stop": "a process is stopped for some seconds, then goes on",
    "segv": "an actor's process dies of a segmentation fault",
    "disk": "files of the buffer or the trainer cannot grow",
    "torn": "the driver is killed, and an unfinished write is left at the end of a file",
    "flip": "the driver is killed, and a byte of a file is flipped: to resume must fail until it is undone",
    "reply": "the driver is killed, and replies between processes get lost after it is resumed",
    "slow_reward": "some rewards never come, in the whole run",
    "nan_reward": "some rewards are not a number, in the whole run",
}
REWARD_KINDS = ("slow_reward", "nan_reward")


class Fault(msgspec.Struct, frozen=True):
    kind: str
    role: str
    """Whose process it hits first."""
    at: float
    """Share of the run's steps that are done."""
    delay_s: float
    """From there on: somewhere inside a step, a publication or a checkpoint."""
    hold_s: float
    """How long a stopped process stands still."""
    seed: int
    """Of what else is to be drawn, such as the byte that flips."""

    def __str__(self) -> str:
        return f"{self.kind} {self.role} at {self.at:.0%} + {self.delay_s:.2f} s"


def roles(run: Run) -> list[str]:
    """Every process of a run that a fault may hit; without Ray there is but one."""
    if run.cluster == "inprocess":
        return [DRIVER]
    rollouts = [f"rollout-{index}" for index in range(run.rollout.replicas)]
    ranks = [f"trainer-{rank}" for rank in range(1, run.trainer.ranks)]
    others = [*(["gateway"] if run.agent.on else []), *(["drafter"] if run.drafter.trains else [])]
    return [DRIVER, "buffer", "reward", "trainer", *ranks, *rollouts, *others]


def plan(seed: int, kinds: Sequence[str], rounds: int, among: Sequence[str]) -> tuple[Fault, ...]:
    """`rounds` faults at growing points of the run. Every kind meets every role before one of them comes again."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--faults {unknown[0]} is none of {', '.join(KINDS)}")
    rng = random.Random(seed)
    pairs = [(kind, role) for kind in kinds if kind not in REWARD_KINDS for role in _victims(kind, among)]
    if not pairs:
        return ()
    points = sorted(rng.uniform(0.0, 0.95) for _ in range(rounds))
    return tuple(
        Fault(kind, role, point, rng.uniform(0.0, 1.5), rng.uniform(0.5, 4.0), rng.getrandbits(32))
        for point, (kind, role) in zip(points, islice(_dealt(pairs, rng), rounds), strict=True)
    )


def _dealt(pairs: list[tuple[str, str]], rng: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        yield from rng.sample(pairs, len(pairs))


def _victims(kind: str, among: Sequence[str]) -> list[str]:
    match kind:
        case "kill" | "stop":
            return list(among)
        case "segv":
            return [role for role in among if role != DRIVER]
        case "disk":
            return [role for role in among if role in ("buffer", "trainer")]
        case _:
            return [DRIVER]
