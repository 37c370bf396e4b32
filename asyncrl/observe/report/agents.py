"""The report's section about episodes of a harness; nothing where there were none."""

from typing import Any

from asyncrl.observe.query.queries import READY
from asyncrl.observe.report import curves
from asyncrl.observe.report.recorded import Recorded

TOTALS = """
    SELECT count(*), sum(turns)::BIGINT, sum(tool_calls)::BIGINT, sum(wasted_tokens)::BIGINT,
        sum(model_seconds) / greatest(sum(seconds), 1e-9), sum(tools_seconds) / greatest(sum(seconds), 1e-9),
        sum(waiting_seconds) / greatest(sum(seconds), 1e-9), count(*) FILTER (branches > 0)
    FROM episodes
"""
"""Of finished episodes, trained on or not."""


def agents(run: Recorded) -> dict[str, Any] | None:
    charts = curves.agents(run)
    if not charts:
        return None
    ((episodes, turns, calls, wasted, model, tools, waiting, branched),) = run.connection.execute(TOTALS).fetchall()
    notes = [
        f"{episodes:,} episodes with {turns / episodes:.1f} turns and {calls / episodes:.1f} tool calls each: "
        f"{model:.0%} of their time the model was sampling, {tools:.0%} the harness and its tools were at work, "
        f"{waiting:.0%} they waited for a worker or an engine.",
    ]
    if branched:
        notes.append(
            f"{branched / episodes:.0%} of the episodes have branches: calls that did not go on from what was sampled "
            "before them. What branches have in common is computed once."
        )
    if wasted:
        notes.append(f"{wasted:,} tokens were sampled for calls that were cut off.")
    branches = run.connection.execute(READY["branches_by_cause"].sql).fetchall()
    return {
        "charts": charts,
        "notes": notes,
        "branches": [[cause.replace("_", " "), f"{n:,}", f"{of:,}", share] for cause, n, of, share in branches],
    }
