"""The figures that are asked for first."""

from typing import Any

from asyncrl.insight.figures import Found
from asyncrl.insight.headline import Figures
from asyncrl.insight.waste import useful


def tiles(found: Found, figures: Figures) -> list[dict[str, str]]:
    run, rows = found.run, found.run.rows
    if not rows:
        return []
    seconds = max(found.seconds, 1e-9)
    samples = sum(row["samples"] for row in rows)
    staleness = sum((row.get("staleness_mean") or 0.0) * row["samples"] for row in rows) / max(samples, 1)
    rate = useful(found)
    told = [
        ("reward", f"{rows[0]['reward']:.3f} → {rows[-1]['reward']:.3f}", "first and last step"),
        *_held_out(found),
        ("samples per second", f"{samples / seconds:,.1f}", f"{samples:,} trained on in {_time(seconds)}"),
        ("tokens per second", f"{(rows[-1].get('generated_tokens') or 0) / seconds:,.0f}", "generated, all engines"),
        ("trainer waited", f"{_waited(figures):.0%}", "for data or weights, of its time"),
        ("engines idle", f"{figures.engines_idle:.0%}", f"mean of {figures.engines}"),
        ("useful tokens", f"{rate:.1%}" if rate is not None else "-", "trained on, not dropped"),
        ("staleness", f"{staleness:.2f}", f"versions; at most {figures.staleness_max:.0f} of {figures.max_staleness}"),
        ("weight sync", _time(figures.sync_seconds), "for one version"),
        ("effective samples", _mean(rows, "ess"), "ess, mean over the steps; 1 is on-policy"),
    ]
    if run.attempts > 1:
        told.append(("attempts", str(run.attempts), "actors placed anew after a death or a resume"))
    return [{"label": label, "value": value, "note": note} for label, value, note in told]


def _held_out(found: Found) -> list[tuple[str, str, str]]:
    scores = found.run.connection.execute("SELECT sampled FROM evaluations ORDER BY step").fetchall()
    if not scores:
        return []
    return [("held-out", f"{scores[0][0]:.1%} → {scores[-1][0]:.1%}", "right answers, sampled")]


def _waited(figures: Figures) -> float:
    return sum(figures.shares.get(cause, 0.0) for cause in ("generation", "tail", "reward", "sync"))


def _mean(rows: Any, name: str) -> str:
    known = [row[name] for row in rows if row.get(name) is not None]
    return f"{sum(known) / len(known):.3f}" if known else "-"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
