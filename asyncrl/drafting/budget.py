"""Which answers give hidden states to the drafter: each with the same chance, which follows from the step before.

A step has more tokens than the drafter may get. First come, first served would take short answers, which are complete
first.
"""

import random


class Budget:
    """For one source of windows, per training step."""

    def __init__(self, tokens: int, longest: int, seed: int) -> None:
        """`tokens` of a step are given, at most one answer more; `longest` of one answer."""
        self._tokens, self._longest = tokens, longest
        self._random = random.Random(seed)
        self._chance = 1.0
        self._offered, self._left = 0, tokens

    def begin_step(self, promised: int = 0) -> None:
        """`promised` tokens of answers that were chosen before are still to come."""
        if self._offered > 0:
            self._chance = min(1.0, self._tokens / self._offered)
        self._offered, self._left = 0, self._tokens - promised

    def chooses(self, tokens: int) -> bool:
        """Whether to take an answer of so many tokens."""
        given = min(tokens, self._longest)
        self._offered += given
        if self._left <= 0 or self._random.random() >= self._chance:
            return False
        self._left -= given
        return True

    def correct(self, offered: int, left: int) -> None:
        """An answer that was `offered` before its end was known is so much shorter; so much more may be taken."""
        self._offered -= offered
        self._left += left
