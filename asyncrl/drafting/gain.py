"""What drafting gave, as the engines measured it: tokens per second against plain decoding at the same batch size."""

from collections.abc import Iterable

from asyncrl.types import SpeculationArm

CLEARLY = 1.02
"""Drafting is said to pay again from here on, so that a range at the border is not reported again and again."""


def net_gain(arms: Iterable[SpeculationArm]) -> float | None:
    """Mean over all measured steps of their speed relative to plain decoding; null where plain was not measured."""
    found = [(arm.steps, arm.tokens_per_second / plain) for plain, range_ in ranges(arms) for arm in range_]
    steps = sum(count for count, _ in found)
    return sum(count * ratio for count, ratio in found) / steps if steps else None


class Notice:
    """Says where drafting does not pay, once per change."""

    def __init__(self) -> None:
        self._off: set[int] = set()

    def changes(self, arms: Iterable[SpeculationArm]) -> list[str]:
        said: list[str] = []
        for plain, range_ in ranges(arms):
            drafting = [arm for arm in range_ if arm.depth]
            if not drafting:
                continue
            best = max(drafting, key=lambda arm: arm.tokens_per_second)
            first, gain = best.batch, best.tokens_per_second / plain
            if (gain < 1) if first not in self._off else (gain >= CLEARLY):
                self._off ^= {first}
                state = "off" if first in self._off else "on again"
                said.append(
                    f"drafting is {state} from {first} running completions on: {gain:.2f}x of plain decoding with "
                    f"{best.verify} tokens"
                )
        return said


def ranges(arms: Iterable[SpeculationArm]) -> list[tuple[float, list[SpeculationArm]]]:
    """Plain decoding's speed and all arms of each range in which it is known."""
    by_first: dict[int, list[SpeculationArm]] = {}
    for arm in _merged(arms):
        by_first.setdefault(arm.batch, []).append(arm)
    plain = {first: arm.tokens_per_second for first, found in by_first.items() for arm in found if not arm.depth}
    return [(plain[first], found) for first, found in sorted(by_first.items()) if plain.get(first)]


def _merged(arms: Iterable[SpeculationArm]) -> list[SpeculationArm]:
    """The same arm of several engines as one: speeds weighted by steps."""
    found: dict[tuple[int, int, int], tuple[int, float]] = {}
    for arm in arms:
        key = (arm.batch, arm.depth, arm.verify)
        steps, total = found.get(key, (0, 0.0))
        found[key] = (steps + arm.steps, total + arm.steps * arm.tokens_per_second)
    return [SpeculationArm(*key, steps, total / steps) for key, (steps, total) in found.items() if steps]
