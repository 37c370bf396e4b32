r"""Rewards for mathematics: answers that are equal count, however they are written; needs the extra `math`.

`\boxed{1/2}`, `0.5`, `$\frac{1}{2}$` and `50\%` are one answer, `\{2, 1\}` and `\{1, 2\}` another. The right answer may
come bare, in dollars, boxed, or behind `####` as in GSM8K.
"""

import logging
from functools import lru_cache
from typing import Any

from asyncrl.system.optional import require
from asyncrl.user_code.score import Score

# Here and not where it is used: importing it takes seconds, which must not count as time spent on the first reward.
verify = require("math_verify", extra="math")
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # completions without a formula are no news
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
FORMULAS = (verify.LatexExtractionConfig(boxed_match_priority=0), verify.ExprExtractionConfig())


def reward(prompt: str, completion: str, answer: str) -> float:
    """1 if the completion's formula equals the reference: the last one boxed, or else the last formula or number."""
    return _equal(completion, answer)


def boxed_reward(prompt: str, completion: str, answer: str) -> Score:
    r"""1 for the right answer in the last \boxed{}; its parts tell a wrong answer from one that is not boxed."""
    boxed = "\\boxed" in completion
    right = _equal(completion, answer) if boxed else 0.0
    return Score(right, {"boxed": float(boxed), "right": right})


def _equal(completion: str, answer: str) -> float:
    last = completion[max(completion.rfind("\\boxed"), 0) :]
    return float(verify.verify(list(_right(answer)), _parse(last), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _right(answer: str) -> tuple[Any, ...]:
    """The reference, parsed once for all samples of a group."""
    text = answer.rpartition("####")[2].strip()
    bare = "\\boxed" not in text and "$" not in text
    if not (parsed := _parse(f"\\boxed{{{text}}}" if bare else text)):
        raise ValueError(f"the reference {answer!r:.200} is no formula; look at the column that task.answer names")
    return tuple(parsed)


def _parse(text: str) -> list[Any]:
    # The deadline is the pool's, which also ends what a signal cannot interrupt.
    return verify.parse(text, FORMULAS, parsing_timeout=None)
