"""The hidden-state buffer: a bounded number of bytes, of which the oldest go first.

Short completions are complete first. A head trained on whatever is there would see them mostly, and it is long
completions that it must speed up. So the longest quarter of the step before stays until nothing else is left to drop,
and fills half of every batch. Completions to some prompts judge the head and are never trained on; a hash of the group
decides, so the split is the same in every process and for every completion to one prompt.
"""

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import xxhash

from asyncrl.drafting.windows import Window

LONG_QUANTILE = 0.75
"""Completions of the step before that are at least this long, among its others, are long."""
LONG_SHARE = 0.5
"""Of a batch's tokens."""


class Counters(msgspec.Struct, kw_only=True):
    """Of windows since the start, and what is held now."""

    received: int = 0
    dropped: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    held: int = 0
    held_tokens: int = 0
    held_bytes: int = 0

    @property
    def bytes_per_token(self) -> float:
        return self.received_bytes / max(1, self.received_tokens)


class HiddenStates:
    """Windows by their order of arrival."""

    def __init__(self, max_bytes: int, held_out: float, seed: int = 0) -> None:
        self._max_bytes = max_bytes
        self._held_out = held_out
        self._random = np.random.default_rng(seed)
        self._held: dict[int, Window] = {}
        self._newest = self._previous = -1
        self._long_from = 0.0
        self.counters = Counters()

    def add(self, windows: Iterable[Window]) -> None:
        for window in windows:
            counters = self.counters
            counters.received += 1
            counters.received_tokens += len(window)
            counters.received_bytes += window.bytes
            if window.version > self._newest:
                self._begin_step(window.version)
            while self._held and counters.held_bytes + window.bytes > self._max_bytes:
                self._drop(self._oldest())
            if window.bytes > self._max_bytes:
                counters.dropped += 1
                continue
            self._held[counters.received] = window
            self._count(window, 1)

    def batch(self, tokens: int) -> list[Window]:
        """At least so many tokens to train on, if there are as many: half of them long completions of the step
        before."""
        trained = [window for window in self._held.values() if not self.is_held_out(window)]
        long = [window for window in trained if self._is_kept(window)]
        chosen = self._draw(long, round(tokens * LONG_SHARE))
        taken = set(map(id, chosen))
        others = [window for window in trained if id(window) not in taken]
        return chosen + self._draw(others, tokens - sum(map(len, chosen)))

    def judges(self, tokens: int) -> list[Window]:
        """At least so many tokens to judge a head by, if there are as many: the newest."""
        held_out = [window for window in self._held.values() if self.is_held_out(window)]
        return list(_until(reversed(held_out), tokens))

    def is_held_out(self, window: Window) -> bool:
        return xxhash.xxh64_intdigest(str(window.slot.group).encode()) < self._held_out * 2**64

    def _draw(self, windows: list[Window], tokens: int) -> list[Window]:
        order: list[int] = self._random.permutation(len(windows)).tolist()
        return list(_until((windows[index] for index in order), tokens))

    def _begin_step(self, version: int) -> None:
        lengths = [window.answer_length for window in self._held.values() if window.version == self._newest]
        self._long_from = float(np.quantile(lengths, LONG_QUANTILE)) if lengths else 0.0
        self._previous, self._newest = self._newest, version

    def _is_kept(self, window: Window) -> bool:
        return window.version == self._previous and window.answer_length >= self._long_from

    def _oldest(self) -> int:
        """The one to drop next."""
        return next((key for key, window in self._held.items() if not self._is_kept(window)), next(iter(self._held)))

    def _drop(self, key: int) -> None:
        self.counters.dropped += 1
        self._count(self._held.pop(key), -1)

    def _count(self, window: Window, sign: int) -> None:
        self.counters.held += sign
        self.counters.held_tokens += sign * len(window)
        self.counters.held_bytes += sign * window.bytes


def _until(windows: Iterator[Window], tokens: int) -> Iterator[Window]:
    """The first windows that have so many tokens together."""
    while tokens > 0 and (window := next(windows, None)) is not None:
        yield window
        tokens -= len(window)
