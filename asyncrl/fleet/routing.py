"""Which engine gets a group: the one that holds the beginning of its prompt unless it is too full, else the least full.

Engines keep the keys and values of prompts until they need the room, or the weights change. What each was given since
is remembered here, as digests of the first characters of a prompt, block by block: the engine with the most leading
blocks holds the prefix. The tokens of a group's own samples need no such rule, nor do the turns of a conversation:
they stay at the engine that their group was given to, until it dies or leaves.

How full an engine is: the samples that it was given and has not finished, over its capacity. What it holds counts only
while it has, with the group, at most `1 + SPARE` times its share of all samples, which is its share of the fleet's
capacity (consistent hashing with bounded loads). So one system prompt that all groups have does not send them all to
one engine: each that was given one holds it. Pure and deterministic: no clock, no randomness.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import blake2b

SPARE = 0.25
"""More than its share that an engine may be given for what it holds."""
BLOCK = 256
"""Characters of a prompt that are compared together; shorter prompts are not worth it."""
REMEMBERED = 10_000
"""Blocks of each engine; the earliest are forgotten first."""


class Router:
    def __init__(self) -> None:
        self._held = Counter[str]()
        self._blocks: dict[str, dict[bytes, None]] = {}

    def give(self, capacities: Mapping[str, float], samples: int, prompt: str = "") -> str:
        """One of the engines that `capacities` names, in their order where nothing else decides."""
        blocks = list(_blocks(prompt)) if len(capacities) > 1 else []
        whole = sum(capacities.values())
        bound = (1 + SPARE) * (sum(self._held[name] for name in capacities) + samples) / whole

        def full(name: str) -> float:
            return (self._held[name] + samples) / capacities[name]

        def known(name: str) -> int:
            return self._leading(name, blocks) if blocks else 0

        within = [name for name in capacities if full(name) <= bound]
        if within:
            chosen = min(within, key=lambda name: (-known(name), full(name)))
        else:  # few samples, and large groups
            chosen = min(capacities, key=lambda name: (full(name), -known(name)))
        self._held[chosen] += samples
        self._remember(chosen, blocks)
        return chosen

    def take_back(self, name: str, samples: int) -> None:
        self._held[name] -= samples

    def held(self, name: str) -> int:
        """Samples that it was given and has not finished."""
        return self._held[name]

    def forget(self, name: str | None = None) -> None:
        """What an engine holds, or all of them, is of no use any more."""
        if name is None:
            self._blocks.clear()
        else:
            self._blocks.pop(name, None)

    def _leading(self, name: str, blocks: list[bytes]) -> int:
        own = self._blocks.get(name, {})
        return next((number for number, block in enumerate(blocks) if block not in own), len(blocks))

    def _remember(self, name: str, blocks: list[bytes]) -> None:
        own = self._blocks.setdefault(name, {})
        own.update(dict.fromkeys(blocks))
        while len(own) > REMEMBERED:
            del own[next(iter(own))]


def _blocks(prompt: str) -> Iterator[bytes]:
    """A digest of the prompt up to the end of each block."""
    digest = blake2b(digest_size=16)
    for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
        digest.update(prompt[begin : begin + BLOCK].encode("utf-8", "surrogatepass"))
        yield digest.digest()
