"""summary.json: the figures that a user or a script needs first. Keys of parts that do not exist yet are null."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.drop_reasons import CALL_CUT_OFF
from asyncrl.system.run_directory import RunDirectory, replace
from asyncrl.types import LedgerCounts
from pipelines.recording.metrics import Row
from pipelines.recording.recorder import Recorder


def write(
    directory: RunDirectory,
    recorder: Recorder,
    *,
    status: str,
    ledger: LedgerCounts | None = None,
    waste: dict[str, int] | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """Write the summary and return it. It is written for failed runs as well, with what is known."""
    summary = {
        "status": status,
        "error": error,
        **_figures(list(recorder.rows), ledger),
        **_evaluations(recorder.evaluations),
        "waste": _waste(waste, list(recorder.rows)),
        "ledger": msgspec.to_builtins(ledger) if ledger else None,
    }
    replace(directory.summary, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    return summary


def kind(directory: RunDirectory) -> str:
    """`run`, or `replay` for what `asyncrl replay --out` wrote."""
    return (directory.read_summary() or {}).get("kind", "run")


def sentence(summary: dict[str, Any]) -> str:
    """The run in one line, for the terminal."""
    if summary["steps"] == 0:
        return f"{summary['status']}: no step was finished"
    scores = ""
    if summary["eval_first"] is not None:
        scores = (
            f"held-out sampled {summary['eval_first']:.3f} -> {summary['eval_last']:.3f}, "
            f"greedy {summary['eval_first_greedy']:.3f} -> {summary['eval_last_greedy']:.3f}; "
        )
    return (
        f"{summary['status']}: {summary['steps']} steps, {summary['samples_trained']} samples in "
        f"{summary['train_loop_seconds']:.0f} s ({summary['samples_per_second']:.0f}/s); {scores}"
        f"staleness max {summary['staleness_max']}, trainer waited {summary['trainer_wait_fraction']:.0%}"
    )


def _figures(rows: Sequence[Row], ledger: LedgerCounts | None) -> dict[str, Any]:
    """Rows of the first steps are missing where their file was damaged; the ledger has counted their samples, too."""
    if not rows:
        return dict.fromkeys(_NO_STEPS) | {"steps": 0, "samples_trained": 0}
    seconds = rows[-1]["loop_seconds"]
    samples = sum(row["samples"] for row in rows)
    waited = sum(row["wait_seconds"] for row in rows)
    first_wave = max(row["first_wave_finished"] for row in rows)
    return {
        "steps": rows[-1]["step"] + 1,
        "samples_trained": ledger.consumed if ledger else samples,
        "train_loop_seconds": seconds,
        "samples_per_second": samples / seconds,
        "generated_tokens_per_second": rows[-1]["generated_tokens"] / seconds,
        "reward_first": rows[0]["reward"],
        "reward_last": rows[-1]["reward"],
        "staleness_mean": sum(row["staleness_mean"] * row["samples"] for row in rows) / samples,
        "staleness_max": max(row["staleness_max"] for row in rows),
        "trainer_wait_fraction": waited / seconds,
        "first_optimizer_work_before_slowest_sample": rows[0]["first_work"] < first_wave,
        "weight_sync_seconds_mean": _mean(rows, "sync_seconds"),
        "mismatch_kl": _mean(rows, "mismatch_kl"),
        "mismatch_abs": _mean(rows, "mismatch_abs"),
        "ess": _mean(rows, "ess"),
        "trainer_peak_memory_bytes": rows[-1].get("trainer_peak_memory_bytes"),
        **_taught(rows),
        **_pool(rows),
        **_drafting(rows[-1]),
        "agents": _agents(rows),
        "judge": rows[-1].get("judge"),
    }


def _waste(dropped: dict[str, int] | None, rows: Sequence[Row]) -> dict[str, int] | None:
    """With what the calls of trained episodes lost; the episodes themselves were not dropped."""
    lost = sum((row.get("agents") or {}).get("wasted_tokens") or 0 for row in rows)
    return {**(dropped or {}), CALL_CUT_OFF: lost} if lost else dropped


def _agents(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Of all episodes that were trained on; null without a harness."""
    found = [row["agents"] for row in rows if row.get("agents")]
    episodes = sum(each["episodes"] for each in found)
    if not episodes:
        return None
    means = ("turns", "tool_calls", "model_share", "tools_share", "waiting_share", "branches")
    causes: Counter[str] = Counter()
    for each in found:
        causes.update({cause: count for cause, count in (each.get("branches_by_cause") or {}).items() if count})
    return {
        "episodes": episodes,
        **{name: sum(each[name] * each["episodes"] for each in found) / episodes for name in means},
        "branches_by_cause": dict(sorted(causes.items())),
        "wasted_tokens": sum(each["wasted_tokens"] for each in found),
    }


def _taught(rows: Sequence[Row]) -> dict[str, Any]:
    """Null without teachers."""
    found = [row["teacher_kl"] for row in rows if row.get("teacher_kl") is not None]
    return {"teacher_kl_first": found[0] if found else None, "teacher_kl_last": found[-1] if found else None}


def _pool(rows: Sequence[Row]) -> dict[str, Any]:
    """How many engines there were; null in runs recorded before that was counted."""
    sizes = [row["replicas"] for row in rows if row.get("replicas")]
    return {
        "replicas_min": min(sizes, default=None),
        "replicas_max": max(sizes, default=None),
        "replicas_last": sizes[-1] if sizes else None,
    }


def _evaluations(evaluations: dict[int, Row]) -> dict[str, Any]:
    """`eval_first` and `eval_last` are the sampled scores; the rest of both evaluations stands beside them."""
    if not evaluations:
        return dict.fromkeys(("eval_first", "eval_last", "eval_first_greedy", "eval_last_greedy", "evaluations"))
    first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
    return {
        "eval_first": first["sampled"],
        "eval_last": last["sampled"],
        "eval_first_greedy": first["greedy"],
        "eval_last_greedy": last["greedy"],
        "evaluations": {str(step): evaluations[step] for step in sorted(evaluations)},
    }


def _mean(rows: Sequence[Row], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def _drafting(last: Row) -> dict[str, Any]:
    """Null without a drafter, and in runs recorded before there was one."""
    drafts, accepted = last["drafts"], last.get("accepted_by_position") or []
    return {
        "acceptance_length_mean": _acceptance_length(last),
        "acceptance_by_position": [count / drafts for count in accepted] if drafts else None,
        "speculation_net_gain": last.get("speculation_net_gain"),
        "drafter": last.get("drafter"),
    }


def _acceptance_length(last: Row) -> float | None:
    """Tokens gained per verified draft: the accepted ones and the one that every step gives; null without drafts."""
    return 1 + last["accepted_tokens"] / last["drafts"] if last["drafts"] else None


_NO_STEPS = (
    "train_loop_seconds",
    "samples_per_second",
    "generated_tokens_per_second",
    "reward_first",
    "reward_last",
    "staleness_mean",
    "staleness_max",
    "trainer_wait_fraction",
    "first_optimizer_work_before_slowest_sample",
    "weight_sync_seconds_mean",
    "mismatch_kl",
    "mismatch_abs",
    "ess",
    "trainer_peak_memory_bytes",
    "teacher_kl_first",
    "teacher_kl_last",
    "replicas_min",
    "replicas_max",
    "replicas_last",
    "acceptance_length_mean",
    "acceptance_by_position",
    "speculation_net_gain",
    "drafter",
    "agents",
    "judge",
)
