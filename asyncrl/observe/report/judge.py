"""What the judge was asked, and what it cost."""

from typing import Any

from asyncrl.observe.report import curves
from asyncrl.observe.report.recorded import Recorded


def judge(run: Recorded) -> dict[str, Any] | None:
    """Nothing for a run without one."""
    charts = curves.judge(run)
    return {"charts": charts, "notes": _notes(run, run.rows[-1]["judge"])} if charts else None


def cost(run: Recorded) -> tuple[str, str] | None:
    """In a few words, for a tile."""
    total = run.rows[-1].get("judge") if run.rows else None
    if not total:
        return None
    tokens = total["prompt_tokens"] + total["reply_tokens"]
    return f"{total['calls']:,} calls", f"of the judge, {tokens:,} tokens; {total['failures']:,} without a verdict"


def _notes(run: Recorded, total: dict[str, Any]) -> list[str]:
    judged = max(total["verdicts"] + total["cache_hits"] + total["failures"], 1)
    mean_s = total["call_seconds"] / max(total["calls"], 1)
    asked = (
        f"{run.setting('reward.judge.model', '')} at {run.setting('reward.judge.url', '')}: {total['calls']:,} calls, "
        f"{total['prompt_tokens']:,} tokens read and {total['reply_tokens']:,} written; {mean_s:.3g} s for a call, on "
        "average."
    )
    again = (
        f"{total['retries']:,} calls were tried again, and {total['rate_limited']:,} times the server asked to wait."
    )
    known = f"{total['cache_hits'] / judged:.1%} had their verdict already, and {total['failures']:,}"
    if not (compared := total.get("compared")):
        waited = f"a completion waited {total['waited_seconds'] / judged:.3g} s for its verdict."
        return [asked, f"Of the completions {known} got none and were dropped; {waited}", again]
    return [
        asked,
        f"Of the comparisons {known} completions were dropped because one of theirs got none.",
        f"{compared:,} pairs were compared, each in both orders; in {total['by_place'] / compared:.1%} of them the "
        "judge preferred a place, the first or the second, and no completion.",
        again,
    ]
