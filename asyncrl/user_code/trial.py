"""The reward, tried on a few prompts before a run as the run will call it: in its own process, under its deadline."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from asyncrl.config.user_code import Reward
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt
from asyncrl.user_code.failures import CallRecord, explain, is_timeout, shortened
from asyncrl.user_code.in_process import AnyPool, make_pool
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult
from asyncrl.user_code.score import Score

MOST_S = 30.0
"""For one call; a judge that needs longer is believed to come to an end."""
PLAUSIBLE = "The answer is 42."
"""The completion of a prompt without a reference."""


class Trial(NamedTuple):
    """One call."""

    what: str
    given: RewardInput
    result: RewardResult

    @property
    def words(self) -> str:
        match self.result:
            case RewardFailure(reason, message):
                return f"{reason}: {message}; such samples would be dropped"
            case Score(total, parts):
                return f"{total:g}, of " + ", ".join(f"{name}={value:g}" for name, value in parts.items())
            case number:
                return f"{number:g}"


async def try_reward(settings: Reward, prompts: Sequence[Prompt], *, turns: bool = False) -> list[Trial]:
    """The calls with the first prompt: an empty completion and a plausible one; `turns`: as the model's turn in a
    conversation.

    A function may fail on some prompts. ConfigError if it fails on all of these.
    """
    pool = make_pool(msgspec.structs.replace(settings, timeout_s=min(settings.timeout_s, MOST_S), workers=1))
    tried: list[Trial] = []
    try:
        for prompt in prompts:
            tried += await _try(pool, prompt, turns=turns)
            if not all(isinstance(trial.result, RewardFailure) for trial in tried) or _takes_too_long(tried):
                return tried[:2]
    finally:
        await pool.close()
    first = tried[1]
    record = CallRecord(settings)
    record.add(first.given, first.result)
    of = f"{len(prompts)} prompts" if len(prompts) > 1 else "prompt"
    raise ConfigError(explain(settings, record.first[0], f"it fails on the first {of} of this run"))


async def _try(pool: AnyPool, prompt: Prompt, *, turns: bool) -> list[Trial]:
    plausible = ("the reference", prompt.answer) if prompt.answer else ("a plausible completion", PLAUSIBLE)
    tried = [("an empty completion", ""), plausible]
    inputs = [RewardInput(prompt.text, text, prompt.answer, (text,) if turns else ()) for _, text in tried]
    results: list[RewardResult] = await pool.score(inputs)
    return [Trial(what, given, result) for (what, _), given, result in zip(tried, inputs, results, strict=True)]


def _takes_too_long(tried: Sequence[Trial]) -> bool:
    """A judge may need its time at first, which says nothing of how it fares later."""
    return any(isinstance(trial.result, RewardFailure) and is_timeout(trial.result.reason) for trial in tried)


def told(trials: Sequence[Trial], prompt: Prompt) -> list[str]:
    """A line for each call."""
    lines = [f"  {shortened(trial.given.completion)} ({trial.what}): {trial.words}" for trial in trials]
    return [f"the reward of prompt {prompt.uid}, {shortened(prompt.text)}", *lines]
