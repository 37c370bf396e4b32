"""Chains of small additions with labels, and the rewards that check every step of a worked completion.

The prompt `a3b+2c-1=` starts at 3, adds 2 and takes away 1. The right completion repeats each step and appends the
running value, which always is one digit: `a3b+25c-14$`. Lengths are long-tailed, so one step of RL has short and long
completions.
"""

import math
from random import Random
from string import ascii_lowercase, digits

import msgspec

from asyncrl.config.task import ChainsTask
from asyncrl.tasks.base import Split, is_held_out
from asyncrl.types import Prompt

END = "$"
"""Ends every completion: the stop token."""
CHARACTERS = digits + ascii_lowercase + "+-="
MIN_SIZE = 2
MAX_OPERAND = 3


class Chain(msgspec.Struct, frozen=True):
    """The start and the running value after each step."""

    values: tuple[int, ...]

    @property
    def steps(self) -> list[str]:
        """Each step as the prompt writes it: label, sign, operand; the first is the start."""
        moves = [f"{b - a:+d}" for a, b in zip(self.values, self.values[1:], strict=False)]
        return [label + move for label, move in zip(ascii_lowercase, [str(self.values[0]), *moves], strict=False)]

    @property
    def prompt(self) -> str:
        return "".join(self.steps) + "="

    def worked(self, written: tuple[int, ...]) -> str:
        """The completion in which the step i ends with the value `written[i]`."""
        first, *rest = self.steps
        return first + "".join(f"{step}{value}" for step, value in zip(rest, written[1:], strict=True)) + END


def draw_size(settings: ChainsTask, random: Random) -> int:
    """Number of operations: log-normal, within its bounds."""
    size = round(settings.median_size * math.exp(random.gauss(0.0, settings.size_spread)))
    return min(max(size, MIN_SIZE), settings.max_size)


def draw_chain(size: int, random: Random) -> Chain:
    """Each step moves by one to MAX_OPERAND, up or down, and never leaves 0..9."""
    values = [random.randrange(10)]
    for _ in range(size):
        before = values[-1]
        reachable = range(max(0, before - MAX_OPERAND), min(9, before + MAX_OPERAND) + 1)
        values.append(random.choice([value for value in reachable if value != before]))
    return Chain(tuple(values))


class Chains:
    """Endless problems; the text alone decides the split it belongs to."""

    def __init__(self, settings: ChainsTask, seed: int) -> None:
        self._settings = settings
        self._seed = seed

    def chain(self, split: Split, index: int) -> Chain:
        random = Random(f"{self._seed}/{split}/{index}")
        size = draw_size(self._settings, random)
        while True:  # a text is held out with chance 1/8, so this ends
            chain = draw_chain(size, random)
            if is_held_out(chain.prompt) == (split == "held_out"):
                return chain

    def prompt(self, split: Split, index: int) -> Prompt:
        chain = self.chain(split, index)
        return Prompt(
            uid=f"chains/{split}/{index}",
            text=chain.prompt,
            answer=chain.worked(chain.values),
            size=len(chain.values) - 1,
        )

    def longest(self) -> Prompt:
        """All of one size are equally long."""
        return Prompt(uid="longest", text=draw_chain(self._settings.max_size, Random(0)).prompt)


def reward(prompt: str, completion: str, answer: str) -> float:
    """1 if every step, every running value and the end are right, else 0."""
    return float(completion == answer)


def graded_reward(prompt: str, completion: str, answer: str) -> float:
    """Share of the steps that are right before the first mistake; 1 only for the whole completion."""
    right = _leading_equal(completion, answer)
    # Two characters of start, four for each step, one at the end.
    done = 0 if right < 2 else (right + 2) // 4 + (completion == answer)
    return done / ((len(answer) + 1) // 4 + 1)


def _leading_equal(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
