"""Runs and replays side by side: one table of figures and of the settings that differ, one picture a metric."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from asyncrl.config.errors import did_you_mean
from asyncrl.data.untrusted import read_table
from asyncrl.errors import ConfigError
from asyncrl.system.run_directory import RunDirectory, read_events
from pipelines.recording import plot

HELD_OUT = {"held_out": "sampled", "held_out_greedy": "greedy"}
"""Metrics that come from evaluations, which only some steps have, and the score that each shows."""
FIRST = ("reward", "held_out", "ess", "mismatch_kl", "staleness_mean", "loss", "grad_norm")
"""The pictures on top; every other figure that a run has comes below."""
CLOCKS = ("step", "version", "time", "loop_seconds", "first_work", "first_wave_finished")
"""Columns that only say when: plotted only if named."""
OWN = ("name", "root")
"""Settings that say nothing about what was run."""
NOTHING = "-"
Rows = dict[str, list[str]]
"""A line of the table by its name: one cell for each run."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What a run or a replay left behind."""

    label: str
    settings: dict[str, str]
    """By the key that a command line has: `trainer.lr`, and `correction` for its choice."""
    summary: dict[str, Any]
    """Empty while the run goes on, and after a kill."""
    curves: dict[str, plot.Curve]


def compare(paths: Sequence[Path], console: Console, *, metrics: Sequence[str] = (), out: Path | None = None) -> None:
    """Print the runs side by side and, with `out`, write a page with their curves; `metrics` names those to show."""
    runs = read(paths)
    _check_metrics(runs, metrics)
    figures = {**_figures(runs), **{f"{name} mean": [_mean(run, name) for run in runs] for name in metrics}}
    settings = _differences(runs)
    if out:
        curves = {
            name: {run.label: run.curves[name] for run in runs if name in run.curves}
            for name in metrics or _usual(runs)
        }
        plot.write(out, [run.label for run in runs], {**figures, **settings}, curves)
    _show(console, runs, figures, settings)
    if out:
        console.print(f"curves: {out}", soft_wrap=True)


def read(paths: Sequence[Path]) -> list[Recorded]:
    """Every run, or ConfigError for the first that cannot be compared."""
    if len(paths) < 2:
        raise ConfigError(f"{paths[0]} alone has nothing to be compared with: asyncrl compare RUN RUN ...")
    resolved = [path.resolve() for path in paths]
    for path, target in zip(paths, resolved, strict=True):
        if resolved.count(target) > 1:
            raise ConfigError(f"{path} is named twice; name each run once")
    short = len({target.name for target in resolved}) == len(resolved)
    return [read_one(path, target.name if short else str(path)) for path, target in zip(paths, resolved, strict=True)]


def read_one(path: Path, label: str) -> Recorded:
    directory = RunDirectory.open(path)
    if not directory.metrics.is_file():
        raise ConfigError(f"{path} has no metrics.parquet: none of its steps is finished, so leave it out for now")
    summary = directory.read_summary() or {}
    return Recorded(
        label=label,
        # Read as it stands, not as a Run: what another release has written can be compared as well.
        settings=dict(_flat(msgspec.yaml.decode(directory.config.read_bytes()))),
        summary=summary,
        curves=_columns(directory.metrics) | _evaluations(directory, summary),
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys and values as they are typed in an override."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            path = prefix.removesuffix(".") if key == "type" and prefix else f"{prefix}{key}"
            yield path, value if isinstance(value, str) else msgspec.json.encode(value).decode().replace('"', "")


def _columns(path: Path) -> dict[str, plot.Curve]:
    """Every numeric column against the number of steps done; of those with columns inside, a reward's parts and the
    figures of agents."""
    metrics = read_table(path)
    if "step" not in metrics.column_names:
        raise ConfigError(f"{path} has no column `step`: no run has written it")
    steps = [step + 1 for step in metrics["step"].to_pylist()]
    plain, metrics = metrics.column_names, metrics.flatten()
    return {
        field.name: plot.Curve(steps, metrics[field.name].to_pylist())
        for field in metrics.schema
        if field.name in plain or field.name.startswith(("reward_parts.", "agents."))
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
    }


def _evaluations(directory: RunDirectory, summary: Mapping[str, Any]) -> dict[str, plot.Curve]:
    """From the summary, or from the events of a run that has none yet."""
    found: dict[int, dict[str, Any]] = {int(step): score for step, score in (summary.get("evaluations") or {}).items()}
    found = found or {e["step"]: e["scores"] for e in read_events(directory.events, "evaluation")}
    steps = sorted(found)
    return {name: plot.Curve(steps, [found[s][key] for s in steps]) for name, key in HELD_OUT.items() if steps}


def _check_metrics(runs: Sequence[Recorded], metrics: Sequence[str]) -> None:
    known = {name for run in runs for name in run.curves}
    for name in metrics:
        if name not in known:
            raise ConfigError(f"--metric {name}: no such figure in these runs; {did_you_mean(name, known)}")


def _usual(runs: Sequence[Recorded]) -> list[str]:
    known = {name for run in runs for name in run.curves}
    return [name for name in FIRST if name in known] + sorted(known.difference(FIRST, CLOCKS))


def _figures(runs: Sequence[Recorded]) -> Rows:
    lines = [_lines(run) for run in runs]
    rows = {name: [line[name] for line in lines] for name in lines[0]}
    optional = ("error", "replay of", "weights")
    return {name: row for name, row in rows.items() if name not in optional or set(row) != {NOTHING}}


def _lines(run: Recorded) -> dict[str, str]:
    """The figures of one run. What the summary does not have is taken from the steps where that is the same."""
    summary = run.summary
    kind = f" ({summary['kind']})" if "kind" in summary else ""
    weights = {True: "identical", False: "different", None: NOTHING}[summary.get("identical")]
    wait = summary.get("trainer_wait_fraction")
    return {
        "status": f"{summary.get('status', 'unfinished')}{kind}",
        "error": summary.get("error") or NOTHING,
        "replay of": Path(summary["replay_of"]).name if "replay_of" in summary else NOTHING,
        "weights": weights,
        "steps": str(run.curves["step"].steps[-1]),
        "samples/s": _number(summary.get("samples_per_second")),
        "held-out sampled": _ends(run, "held_out"),
        "held-out greedy": _ends(run, "held_out_greedy"),
        "reward": _ends(run, "reward"),
        "staleness mean": _mean(run, "staleness_mean"),
        "staleness max": _number(max(_finite(run, "staleness_max"), default=None)),
        "ess": _mean(run, "ess"),
        "mismatch_kl": _mean(run, "mismatch_kl"),
        "grad norm": _mean(run, "grad_norm"),
        "trainer waited": NOTHING if wait is None else f"{wait:.0%}",
    }


def _differences(runs: Sequence[Recorded]) -> Rows:
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in OWN)
    rows = {key: [run.settings.get(key, NOTHING) for run in runs] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _finite(run: Recorded, name: str) -> list[float]:
    """A skipped step has a norm that is no number."""
    values = run.curves[name].values if name in run.curves else []
    return [value for value in values if value is not None and isfinite(value)]


def _mean(run: Recorded, name: str) -> str:
    values = _finite(run, name)
    return _number(sum(values) / len(values)) if values else NOTHING


def _ends(run: Recorded, name: str) -> str:
    """First and last; a replay that was not evaluated has only the first score."""
    curve = run.curves.get(name)
    if curve is None or not curve.values:
        return NOTHING
    last = _number(curve.values[-1]) if len(curve.values) > 1 else NOTHING
    return f"{_number(curve.values[0])} -> {last}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"


def _show(console: Console, runs: Sequence[Recorded], figures: Rows, settings: Rows) -> None:
    if not console.is_terminal:
        console.width = 1000  # a file has no edge at which a figure would have to be broken
    table = Table(show_header=True)
    table.add_column("")
    for run in runs:
        table.add_column(run.label, overflow="fold")
    for name, row in figures.items():
        table.add_row(name, *row)
    table.add_section()
    for name, row in settings.items() or {"settings": ["no difference"] * len(runs)}.items():
        table.add_row(name, *row)
    console.print(table)
