"""The report's charts, described for the page: which figures, over what, with which words."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from asyncrl.drafting.gain import ranges
from asyncrl.observe.report.recorded import Recorded, Row, differences
from asyncrl.types import SpeculationArm

POINTS = 1500
"""Most points of a line; of more, means of neighbours."""
BINS = 32
RATES = 5
"""Bars of the histogram of success rates, from 0 to 1."""
COLOURS = 6
"""Lines of a chart."""
GIB = 2.0**-30
Chart = dict[str, Any]


def learning(run: Recorded) -> list[Chart]:
    if not run.rows:
        return []
    charts = [_lines(run, "Reward", {"reward": "reward"}, "mean reward", note="mean of the samples of each step")]
    charts += _parts(run)
    charts += _teachers(run)
    scores = run.connection.execute("SELECT step, sampled, greedy, suites FROM evaluations ORDER BY step").fetchall()
    if scores:
        steps = [score[0] for score in scores]
        series = [
            {"name": name, "x": steps, "y": [score[place] for score in scores], "dots": True}
            for place, name in ((1, "sampled"), (2, "greedy"))
        ]
        for suite in sorted({name for score in scores for name in score[3] or ()}):
            of_suite = [(score[0], score[3][suite]["sampled"]) for score in scores if suite in (score[3] or ())]
            series.append({"name": suite, "x": [x for x, _ in of_suite], "y": [y for _, y in of_suite], "dots": True})
        charts.append(
            _chart(
                "Held-out", "share of right completions", series, note="prompts that are not trained on", percent=True
            )
        )
    charts += _held_out_by_source(run)
    charts.append(_lines(run, "Gradient norm", {"grad_norm": "gradient norm"}, "norm before clipping", from_zero=True))
    charts.append(
        _lines(run, "Completion length", {"length_mean": "mean", "length_max": "longest"}, "tokens", from_zero=True)
    )
    return charts + _load(run)


def _held_out_by_source(run: Recorded) -> list[Chart]:
    """Nothing where one source is all."""
    found = run.connection.execute("SELECT step, by_source FROM evaluations ORDER BY step").fetchall()
    told: list[tuple[int, dict[str, float]]] = [(step, scores) for step, scores in found if scores]
    sources = sorted({source for _, scores in told for source in scores})[:COLOURS]
    if not sources:
        return []
    x = [step for step, _ in told]
    series = [
        {"name": source, "x": x, "y": [scores.get(source) for _, scores in told], "dots": True} for source in sources
    ]
    note = "sampled completions to prompts that are not trained on"
    return [_chart("Held-out by source", "share of right completions", series, note=note, percent=True)]


def _load(run: Recorded) -> list[Chart]:
    """Nothing for a model without experts."""
    note = "tokens of the busiest expert over the mean, averaged over the layers; 1 is an even load"
    charts = [
        _lines(run, "Busiest expert", {"expert_load_max": "busiest"}, "times the mean load", from_zero=True, note=note),
        _lines(
            run, "Idle experts", {"expert_idle": "without a token"}, "share of experts", percent=True, from_zero=True
        ),
    ]
    return [chart for chart in charts if chart["series"]]


def _teachers(run: Recorded) -> list[Chart]:
    """Nothing without teachers."""
    note = "mean of log p of the policy - log p of its teachers over the tokens that were trained on"
    work = "all teachers together, since the start; waited is the sum over the samples"
    charts = [
        _lines(run, "Distance to the teachers", DISTANCES, "nats per token", note=note),
        _lines(run, "Work of the teachers", TEACHERS, "seconds", from_zero=True, note=work),
    ]
    return [chart for chart in charts if chart["series"]]


def _parts(run: Recorded) -> list[Chart]:
    """Nothing where rewards are plain numbers."""
    told = [(row["step"], row.get("reward_parts") or {}) for row in run.rows]
    names = dict.fromkeys(name for _, parts in told for name in parts)
    if not names:
        return []
    series = [_line([{"step": step, "mean": parts.get(name)} for step, parts in told], "mean", name) for name in names]
    note = "mean of each part over the samples that have it"
    return [_chart("Reward parts", "mean", series, note=note)]


def correction(run: Recorded) -> list[Chart]:
    charts = [
        _lines(run, "Effective sample size", WORTH, "ess", note="what a step's tokens are worth; 1 is on-policy"),
        _lines(run, "Importance ratio", RATIOS, "pi / mu", note="trainer's probability over the engine's, by token"),
        _lines(run, "Mismatch", MISMATCH, "nats per token", from_zero=True),
        _lines(run, "Router replay", ROUTES, "share of routes", percent=True, from_zero=True, note=ROUTES_NOTE),
        _lines(run, "Corrected tokens", CORRECTED, "share of tokens", percent=True, from_zero=True),
        _lines(run, "Staleness", STALENESS, "versions", note="age of each sample's oldest token", from_zero=True),
    ]
    return [chart for chart in charts if chart["series"]]


DISTANCES = {"teacher_kl": "reverse KL", "teacher_divergence": "over the likeliest tokens"}
TEACHERS = {"teacher_busy_seconds": "computing", "teacher_waited_seconds": "samples waited"}
WORTH = {"ess": "of the ratios", "ess_used": "of the weights, as they are used"}
RATIOS = {"rho_p1": "1st percentile", "rho_p50": "median", "rho_p99": "99th percentile"}
MISMATCH = {"mismatch_abs": "mean |log pi - log mu|", "mismatch_k3": "k3"}
ROUTES = {"route_mismatch": "the trainer would choose others"}
ROUTES_NOTE = "a route: the experts that the engine chose for a token in a layer"
CORRECTED = {"truncated_fraction": "truncated", "rejected_fraction": "rejected", "clip_fraction": "clipped by the loss"}
STALENESS = {"staleness_mean": "mean", "staleness_max": "largest", "effective_staleness": "allowed"}
HELD = {"in_flight": "in flight", "buffered": "in the buffer", "running": "running", "waiting": "queued in engines"}


def memory(run: Recorded) -> list[Chart]:
    if not run.rows:
        return []
    charts = [
        _lines(run, "GPU memory", {"trainer_peak_memory_bytes": "trainer, peak"}, "GiB", scale=GIB, from_zero=True)
    ]
    resident = [{"step": row["step"], **(row.get("resident_bytes") or {})} for row in run.rows]
    names = sorted({name for row in resident for name in row if name != "step"})
    series = [_line(resident, name, name, GIB) for name in names]
    charts.append(_chart("Host memory", "GiB", series, from_zero=True, note="resident, by process"))
    charts.append(_lines(run, "Samples held", HELD, "samples", from_zero=True, note="at the end of each step"))
    if len({row.get("replicas") for row in run.rows}) > 1:
        charts.append(_lines(run, "Engines", {"replicas": "engines"}, "engines", from_zero=True))
    return [chart for chart in charts if chart["series"]]


def distributions(run: Recorded) -> list[Chart]:
    completions = run.completions
    if not len(completions["answer_tokens"]):
        return []
    lengths = completions["answer_tokens"].astype(np.int64)
    limit = int(run.setting("rollout.max_tokens", 0))
    middle, high = np.percentile(lengths, [50, 99])
    charts = [
        _bars(
            "Completion lengths", "tokens", *_binned(lengths),
            note=f"median {middle:.0f}, 99 % up to {high:.0f}, longest {lengths.max()}, limit {limit}",
        )
    ]  # fmt: skip
    seconds = (completions["finished"] - completions["started"]).astype(np.float64)
    middle, high = np.percentile(seconds, [50, 99])
    charts.append(
        _bars(
            "Generation time", "seconds", *_binned(seconds),
            note=f"median {middle:.3g} s, 99 % up to {high:.3g} s, longest {seconds.max():.3g} s",
        )
    )  # fmt: skip
    ages = np.ma.compressed(np.ma.masked_invalid(np.ma.asarray(completions["staleness"], np.float64))).astype(np.int64)
    if len(ages):
        counts = np.bincount(np.maximum(ages, 0))
        labels = [str(age) for age in range(len(counts))]
        bound = run.setting("max_staleness", 0)
        note = f"of trained samples, in versions; max_staleness={bound}"
        charts.append(_bars("Staleness", "versions old", labels, labels, counts.tolist(), note=note))
    rewards = completions["reward"].astype(np.float64)
    charts.append(_bars("Rewards", "reward", *_binned(rewards), note=f"mean {rewards.mean():.3g}"))
    return charts


def agents(run: Recorded) -> list[Chart]:
    """Nothing for a run without a harness."""
    turns = run.connection.execute("SELECT turns FROM episodes").fetchnumpy()["turns"]
    if not len(turns):
        return []
    told = [{"step": row["step"], **(row.get("agents") or {})} for row in run.rows]
    causes = sorted({cause for row in told for cause in row.get("branches_by_cause") or {}})
    branches = [
        {"step": row["step"]}
        | {cause: ((row.get("branches_by_cause") or {}).get(cause) or 0) / row["episodes"] for cause in causes}
        for row in told
        if row.get("episodes")
    ]
    shares = {"model_share": "model", "tools_share": "harness and tools", "waiting_share": "waiting"}
    charts = [
        _bars("Turns of an episode", "turns", *_binned(turns), unit="episodes"),
        _chart(
            "Turns and tool calls",
            "in an episode",
            [_line(told, "turns", "turns"), _line(told, "tool_calls", "tool calls")],
        ),
        _chart("Time of episodes", "share", [_line(told, *pair) for pair in shares.items()], percent=True),
        _chart("Branches", "in an episode", [_line(branches, cause, cause.replace("_", " ")) for cause in causes]),
    ]
    known = [chart for chart in charts[1:] if any(y is not None for each in chart["series"] for y in each["y"])]
    return [charts[0], *known]


JUDGE_CALLS = {
    "calls": "calls",
    "cache_hits": "from the cache",
    "retries": "retries",
    "failures": "without a verdict",
}


def judge(run: Recorded) -> list[Chart]:
    """Nothing for a run without a judge."""
    rows = [{"step": row["step"], **row["judge"]} for row in run.rows if row.get("judge")]
    if not rows:
        return []
    grown = {name: differences(rows, name).tolist() for name in JUDGE_CALLS}
    told = [{"step": row["step"], **{name: grown[name][at] for name in JUDGE_CALLS}} for at, row in enumerate(rows)]
    series = [_line(told, name, label) for name, label in JUDGE_CALLS.items()]
    return [_chart("Calls of the judge", "in a step", series, from_zero=True, note="held-out completions as well")]


ASKED = """
WITH asked AS (
    SELECT *, row_number() OVER (PARTITION BY prompt ORDER BY group_id) = 1 AS is_new FROM (
        SELECT group_id, any_value(coalesce(g.step, g.version)) AS step, coalesce(any_value(source), 'all') AS source,
            any_value(prompt) AS prompt, avg(reward) AS rate
        FROM trajectories t JOIN groups g USING (group_id) WHERE g.fate <> 'buffered' GROUP BY group_id
    )
)
"""
"""Groups that have ended, with the step that trained them; of those that were dropped the version they began with."""
BY_STEP = """
    SELECT step, source, count(*) AS groups, count(*) FILTER (is_new) AS new, sum(rate) AS reward,
        count(*) FILTER (rate BETWEEN ? AND ?) AS inside,
        list(rate) AS rates
    FROM asked GROUP BY step, source ORDER BY step, source
"""


def prompts(run: Recorded) -> list[Chart]:
    """Nothing before the first completion."""
    low, high = run.setting("curriculum.band", None) or (None, None)
    rows: list[Row] = run.connection.sql(ASKED + BY_STEP, params=[low, high]).to_arrow_table().to_pylist()
    if not rows:
        return []
    charts = [_asked(rows), _rates(rows)]
    if low is not None:
        note = f"share of the groups whose mean reward was in curriculum.band, {low:g} to {high:g}"
        charts.append(_by_source(rows, "inside", "In the band", "share of groups", note=note, percent=True))
    if len({row["source"] for row in rows}) > 1:
        charts.append(_by_source(rows, "reward", "Reward by source", "mean reward"))
    return charts


def _asked(rows: Sequence[Row]) -> Chart:
    totals, told = Counter[str](), dict[int, Row]()
    for row in rows:
        totals.update({name: row[name] for name in ("groups", "new")})
        told[row["step"]] = {"step": row["step"], **totals}
    lines = list(told.values())
    series = [_line(lines, "groups", "groups"), _line(lines, "new", "different prompts")]
    return _chart("Prompts", "asked so far", series, from_zero=True)


def _rates(rows: Sequence[Row]) -> Chart:
    counts: dict[int, Counter[int]] = {}
    for row in rows:
        counts.setdefault(row["step"], Counter()).update(map(_bin, row["rates"]))
    told = [{"step": step} | {str(b): found[b] / found.total() for b in range(RATES)} for step, found in counts.items()]
    names = [f"{100 * b // RATES} to {100 * (b + 1) // RATES} %" for b in range(RATES)]
    series = [_line(told, str(b), name) for b, name in enumerate(names)]
    note = "groups by their mean reward, which is the success rate where rewards are 0 and 1"
    return _chart("Success rates", "share of groups", series, note=note, percent=True, from_zero=True)


def _bin(rate: float) -> int:
    return min(max(int(rate * RATES), 0), RATES - 1)


def _by_source(rows: Sequence[Row], name: str, title: str, y_label: str, **how: Any) -> Chart:
    """The mean of `name` over each source's groups; of so many sources as there are colours."""
    sources = sorted({row["source"] for row in rows})[:COLOURS]
    told = [{"step": row["step"], row["source"]: row[name] / row["groups"]} for row in rows]
    lines = [[row for row in told if source in row] for source in sources]
    series = [_line(line, source, source) for line, source in zip(lines, sources, strict=True)]
    return _chart(title, y_label, series, **how)


def drafting(run: Recorded) -> list[Chart]:
    """Nothing for a run without a drafter."""
    rows = [row for row in run.rows if row.get("drafts")]
    if not rows:
        return []
    drafts, accepted = differences(rows, "drafts"), differences(rows, "accepted_tokens")
    lengths = np.where(drafts > 0, 1 + accepted / np.maximum(drafts, 1), np.nan)
    told = [{"step": row["step"], "length": length} for row, length in zip(rows, lengths.tolist(), strict=True)]
    series = [_line(told, "length", "acceptance length")]
    trained = [{"step": row["step"], **drafter} for row in rows if (drafter := row.get("drafter"))]
    if any(row.get("acceptance") for row in trained):
        series.append(_line(trained, "acceptance", "expected of the head, on held-out samples"))
    charts = [_chart("Acceptance length", "tokens per draft", series, note="1 is plain decoding"), *_training(trained)]
    last = rows[-1]
    if positions := last.get("accepted_by_position"):
        shares = [count / last["drafts"] for count in positions]
        labels = [str(place + 1) for place in range(len(shares))]
        title, x_label = "Acceptance by position", "position in the draft"
        charts.append(_bars(title, x_label, labels, labels, shares, percent=True, unit="accepted"))
    return charts + _gains([SpeculationArm(**arm) for arm in last.get("speculation") or []])


def _training(rows: Sequence[Row]) -> list[Chart]:
    """Nothing for a head that is not trained."""
    if not rows:
        return []
    known = {"seconds": "all", "seconds_beside": "while the policy's trainer was at work"}
    series = [_line(rows, name, label) for name, label in known.items() if rows[-1].get(name) is not None]
    return [_chart("Training of the drafting head", "seconds so far", series)]


def _gains(arms: list[SpeculationArm]) -> list[Chart]:
    """By batch size, where both drafting and plain decoding were measured."""
    drafted = [(plain, [arm for arm in found if arm.depth]) for plain, found in ranges(arms)]
    best = [(found[0].batch, max(arm.tokens_per_second for arm in found) / plain) for plain, found in drafted if found]
    if not best:
        return []
    labels, gains = [f"{batch}+" for batch, _ in best], [gain for _, gain in best]
    note = "best draft over plain decoding; 1 is no gain"
    chart = _bars("Net gain by batch size", "running completions", labels, labels, gains, note=note, unit="x")
    return [chart | {"line": 1, "marked": [place for place, gain in enumerate(gains) if gain < 1]}]


def _lines(
    run: Recorded, title: str, columns: dict[str, str], y_label: str, *, scale: float = 1.0, **how: Any
) -> Chart:
    """One line for each column that was recorded."""
    known = [name for name in columns if any(row.get(name) is not None for row in run.rows)]
    return _chart(title, y_label, [_line(run.rows, name, columns[name], scale) for name in known], **how)


def _line(rows: Sequence[Row], name: str, label: str, scale: float = 1.0) -> dict[str, Any]:
    """Over the number of steps done."""
    points = [(row["step"] + 1, row.get(name)) for row in rows]
    size = math.ceil(len(points) / POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    values = [_mean((value for _, value in part), scale) for part in parts]
    return {"name": label, "x": [part[-1][0] for part in parts], "y": values}


def _mean(values: Iterable[float | None], scale: float) -> float | None:
    known = [scale * value for value in values if value is not None and math.isfinite(value)]
    return float(f"{sum(known) / len(known):.6g}") if known else None


def _chart(title: str, y_label: str, series: list[dict[str, Any]], *, note: str = "", **how: Any) -> Chart:
    return {
        "type": "lines",
        "title": title,
        "note": note,
        "x_label": "step",
        "y_label": y_label,
        "series": series,
        **how,
    }


def _binned(values: Any) -> tuple[list[str], list[str], list[int]]:
    """Labels, ranges and counts; of whole numbers the bins are whole."""
    low, high = float(values.min()), float(values.max())
    whole = bool(np.all(np.mod(values[:10_000], 1) == 0)) and np.issubdtype(values.dtype, np.integer)
    if whole:
        width = max(1, math.ceil((high - low + 1) / BINS))
        edges = np.arange(low, high + width + 1, width)
    else:
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    counts, _ = np.histogram(values, edges)
    labels = [f"{edge:.3g}" if not whole else f"{edge:.0f}" for edge in edges[:-1]]
    ends = [edge - 1 for edge in edges[1:]] if whole else edges[1:].tolist()
    ranges = [
        start if whole and end <= float(start) else f"{start} to {end:.3g}"
        for start, end in zip(labels, ends, strict=True)
    ]
    return labels, ranges, counts.tolist()


def _bars(
    title: str,
    x_label: str,
    labels: list[str],
    ranges: list[str],
    values: Sequence[float],
    *,
    note: str = "",
    unit: str = "completions",
    y_label: str = "",
    percent: bool = False,
) -> Chart:
    return {
        "type": "bars", "title": title, "note": note, "x_label": x_label, "y_label": y_label or unit, "labels": labels,
        "ranges": ranges, "values": list(values), "unit": unit, "percent": percent,
    }  # fmt: skip
