"""The judge, asked once before a run: a wrong key, name or template is told before anything expensive starts."""

import msgspec

from asyncrl.config.judge import Judge
from asyncrl.errors import ConfigError
from asyncrl.judges.form import Asked, Pair
from asyncrl.judges.judge import ModelJudge
from asyncrl.types import Prompt
from asyncrl.user_code.failures import CallRecord, explain, is_timeout, shortened
from asyncrl.user_code.protocol import RewardFailure, RewardInput
from asyncrl.user_code.trial import PLAUSIBLE

MOST_S = 30.0
"""For its verdict; a judge that needs longer is believed to come to an end."""
RETRIES = 2
WORSE = "I do not know."
"""What a plausible completion is compared with."""
BETTER = {1.0: "first", 0.0: "second", 0.5: "tie"}


async def try_judge(settings: Judge, prompt: Prompt) -> list[str]:
    """What it says of a plausible completion, in lines. ConfigError if it fails, unless it only takes its time."""
    limit_s = min(settings.deadline_s, MOST_S)
    patience = {"retries": min(settings.retries, RETRIES), "deadline_s": limit_s, "max_calls": 0, "max_tokens": 0}
    judge = ModelJudge(msgspec.structs.replace(settings, timeout_s=min(settings.timeout_s, limit_s), **patience))
    try:
        completion = prompt.answer or PLAUSIBLE
        one = RewardInput(prompt.text, completion, prompt.answer)
        given: Asked = one
        if settings.pairs:
            given = Pair(one, msgspec.structs.replace(one, completion=WORSE))
        verdict = await judge.verdict(given)
    finally:
        await judge.close()
    against = f" against {shortened(WORSE)}" if settings.pairs else ""
    said = f"the judge {settings.url} ({settings.model}) on {shortened(completion)}{against}"
    if not isinstance(verdict, RewardFailure):
        grades = ", ".join(
            f"{name}={BETTER[points] if settings.pairs else format(points, 'g')}" for name, points in verdict.items()
        )
        return [f"{said}: {grades}; {judge.stats.tokens:,} tokens"]
    if is_timeout(verdict.reason):
        return [f"{said}: {verdict.message}; the run begins all the same"]
    record = CallRecord(settings)
    record.add(given, verdict)
    raise ConfigError(explain(settings, record.first[0], "it fails before the run has begun"))
