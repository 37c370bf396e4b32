"""From what was recorded to the figures of the headline, the shares of the loop's time and the tokens' outcomes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncrl.drop_reasons import CALL_CUT_OFF
from asyncrl.observe.report.headline import Figures
from asyncrl.observe.report.recorded import Recorded, differences
from asyncrl.observe.report.time_breakdown import CAUSES, Judged, Pieces, Running, split


class Found:
    """Computed once, used by several parts of the report."""

    def __init__(self, run: Recorded) -> None:
        self.run = run
        completions = run.completions
        self.running = Running.of(completions["started"].astype(np.float64), completions["finished"].astype(np.float64))
        self.judging = judging(run)
        self.pieces: Pieces = split(run.events, self.running, Judged(self.judging["end"], self.judging["judging"]))
        self.outcomes = outcomes(run)

    @property
    def seconds(self) -> float:
        return sum(self.pieces.seconds().values())

    def figures(self) -> Figures:
        run, total = self.run, self.seconds
        by_cause = self.pieces.seconds()
        tokens = run.completions["answer_tokens"]
        sampled = sum(each["tokens"] for each in self.outcomes.values())
        steps = len(run.rows)
        return Figures(
            steps=steps,
            loop_seconds=total,
            shares={cause: seconds / total for cause, seconds in by_cause.items()} if total else {},
            drops={
                name: each["tokens"] / sampled for name, each in self.outcomes.items() if each["dropped"] and sampled
            },
            engines=int(run.rows[-1].get("replicas") or run.setting("rollout.replicas", 1)) if run.rows else 1,
            engines_idle=self._idle(),
            running_most=self.running.most,
            running_tail=self._running_during("tail"),
            tokens_median=float(np.median(tokens)) if len(tokens) else 0.0,
            tokens_longest=float(tokens.max(initial=0)),
            reward_seconds=self._reward_seconds(),
            reward_judging=_weighted(self.judging["judging"], self.judging["seconds"]),
            reward_workers=int(run.setting("reward.workers", 1)),
            reward_busy=_weighted(self.judging["busy"], self.judging["seconds"]),
            judge_concurrency=self._judge_concurrency(),
            sync_seconds=_mean([row["sync_seconds"] for row in run.rows if row.get("sync_seconds")]),
            step_seconds=total / steps if steps else 0.0,
            staleness_max=max((row.get("staleness_max") or 0 for row in run.rows), default=0),
            max_staleness=int(run.setting("max_staleness", 0)),
            waiting=_mean([row.get("waiting") or 0 for row in run.rows]),
            ranks=int(run.setting("trainer.ranks", 1)),
            on_gpu=bool(run.rows and run.rows[-1].get("trainer_peak_memory_bytes")),
            drafting=run.setting("drafter.type", "none") != "none",
            one_process=run.setting("cluster", "") == "inprocess",
            transport=str(run.setting("weights.transport", "auto")),
        )

    def _reward_seconds(self) -> float:
        judged = self.judging["judged"].sum()
        return float(self.judging["waited"].sum() / judged) if judged else 0.0

    def _judge_concurrency(self) -> int:
        """0 without a judge, and where the function takes longer than it."""
        judge = (self.run.rows[-1].get("judge") if self.run.rows else None) or {}
        slow = judge.get("waited_seconds", 0.0) > differences(self.run.rows, "reward_waited_seconds").sum() / 2
        return int(self.run.setting("reward.judge.concurrency", 1)) if judge and slow else 0

    def _running_during(self, cause: str) -> float:
        """Mean number of completions that ran in the pieces of a cause."""
        chosen = self.pieces.causes == [*CAUSES].index(cause)
        starts, ends = self.pieces.starts[chosen], self.pieces.ends[chosen]
        return _weighted(self.running.at((starts + ends) / 2), ends - starts)

    def _idle(self) -> float:
        """Share of the loop in which an engine generated nothing, mean over the engines."""
        starts, ends, engine = self.pieces.starts, self.pieces.ends, self.run.completions["engine"]
        if not len(starts) or not len(engine):
            return 0.0
        grid = np.interp(
            np.linspace(0, self.seconds, GRID), np.append(0.0, np.cumsum(ends - starts)), np.append(starts[0], ends)
        )
        idle = [
            float(
                np.mean(
                    Running.of(*(self.run.completions[n][engine == name] for n in ("started", "finished"))).at(grid)
                    == 0
                )
            )
            for name in np.unique(engine.astype(str))
        ]
        return _mean(idle)


GRID = 4000
"""Moments at which engines are looked at."""


def judging(run: Recorded) -> dict[str, Any]:
    """What the reward function did from step to step; empty in runs that did not record it."""
    rows = [row for row in run.rows if row.get("reward_judged") is not None]
    ends = np.array([row["time"] for row in rows], np.float64)
    begun = next((event["time"] for event in run.events if event["kind"] == "loop_started"), 0.0)
    seconds = np.maximum(np.diff(ends, prepend=min(begun, ends[0]) if len(ends) else 0.0), 1e-9)
    judged, waited = differences(rows, "reward_judged"), differences(rows, "reward_waited_seconds")
    if len(rows) and rows[0]["step"] == 0:  # what was judged before the loop were held-out completions
        waited[0], judged[0] = waited[0] * rows[0]["samples"] / max(judged[0], 1), rows[0]["samples"]
    workers = max(int(run.setting("reward.workers", 1)), 1)
    return {
        "start": ends - seconds,
        "end": ends,
        "seconds": seconds,
        "judged": judged,
        "waited": waited,
        "judging": waited / seconds,
        "busy": np.minimum(differences(rows, "reward_busy_seconds") / seconds / workers, 1.0),
    }


def outcomes(run: Recorded) -> dict[str, dict[str, Any]]:
    """Sampled tokens and completions by outcome; completions that were never stored are taken from the summary."""
    found: dict[str, dict[str, Any]] = {}
    rows = run.connection.execute(
        "SELECT coalesce(drop_reason, fate, 'buffered') AS name, fate = 'dropped' AS dropped, "
        "sum(answer_tokens) AS tokens, count(*) AS completions FROM trajectories GROUP BY ALL"
    ).fetchall()
    for name, dropped, tokens, completions in rows:
        found[name] = {"tokens": int(tokens), "completions": int(completions), "dropped": bool(dropped)}
    lost = "SELECT sum(wasted_tokens), count(*) FROM episodes WHERE wasted_tokens > 0"
    for tokens, episodes in run.connection.execute(lost).fetchall():
        if episodes:
            found[CALL_CUT_OFF] = {"tokens": int(tokens), "completions": int(episodes), "dropped": True}
    waste: Mapping[str, int] = run.summary.get("waste") or {}
    for reason, tokens in waste.items():
        if tokens > (known := found.get(reason, {"tokens": 0}))["tokens"]:
            found[reason] = known | {"tokens": tokens, "completions": known.get("completions"), "dropped": True}
    return found


def _mean(values: list[Any]) -> float:
    return float(sum(values) / len(values)) if values else 0.0


def _weighted(values: Any, weights: Any) -> float:
    total = float(np.sum(weights))
    return float(np.sum(values * weights) / total) if total else 0.0
