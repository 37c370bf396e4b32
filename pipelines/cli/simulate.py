"""`asyncrl simulate`: a run on a virtual clock, and the best split of a cluster. Everything it writes says so."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

import msgspec
from rich.console import Console
from rich.table import Table

from asyncrl.config import Run
from asyncrl.config.errors import did_you_mean
from asyncrl.drop_reasons import DropReason
from asyncrl.errors import ConfigError
from asyncrl.simulation import profile as profiles
from asyncrl.simulation.calibration import calibrate
from asyncrl.simulation.loop import simulate
from asyncrl.simulation.outcome import Outcome, Rates
from asyncrl.simulation.profile import Profile, Sharing
from asyncrl.simulation.sizing import Sizing, shortened, size, warm_up
from asyncrl.system.optional import require
from asyncrl.system.run_directory import RunDirectory, replace
from pipelines.compose import CONFIGS, changed, compose, from_yaml

PREFIX = "profile."
"""Of overrides that change what things cost, not the run."""
CHANGEABLE = (
    *("seed", "steps", "max_staleness", "staleness", "flow"),
    *("rollout", "elastic", "buffer", "reward", "algorithm"),
)
"""Settings of a recorded run that a simulation can change."""
MARK = "SIMULATED, not measured"
BOTH_WAIT = 0.2
"""Shares of time from which a split alone cannot be the remedy."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command line."""

    overrides: Sequence[str] = ()
    profile: str | None = None
    from_run: Path | None = None
    gpus: int | None = None
    trainer_gpus: int | None = None
    steps: int | None = None
    save: Path | None = None
    json: bool = False
    out: Path | None = None


def run(options: Options, console: Console) -> None:
    """Simulate one split, or with `gpus` alone look for the best one, and show it."""
    settings, profile = prepare(options)
    if options.save:
        replace(_writable(options.save, "--save"), profiles.to_yaml(profile))
    if options.gpus is not None and options.trainer_gpus is None:
        found = size(settings, profile, options.gpus)
    else:
        found = _one(settings, profile, options)
    if options.out:
        _picture(_writable(options.out, "--out"), found)
    if options.json:
        console.print(msgspec.json.format(msgspec.json.encode(found)).decode(), soft_wrap=True)
    else:
        _show(console, settings, found)


def prepare(options: Options) -> tuple[Run, Profile]:
    """The run and its costs, both checked."""
    costs = [text for text in options.overrides if text.startswith(PREFIX)]
    others = [text for text in options.overrides if not text.startswith(PREFIX)]
    if (options.profile is None) == (options.from_run is None):
        known = ", ".join(sorted(path.stem for path in (CONFIGS / "profile").glob("*.yaml")))
        raise ConfigError(
            f"say what things cost: --from RUN measures a finished run, --profile takes a file or one of {known}; "
            "one of them"
        )
    if options.from_run is not None:
        directory = RunDirectory.open(options.from_run)
        recorded = from_yaml(directory.config)
        raw = msgspec.to_builtins(calibrate(directory, recorded))
        settings = changed(recorded, others, allowed=CHANGEABLE)
    else:
        raw = profiles.read(_profile(str(options.profile)))
        settings = compose(others)
    for text in costs:
        _override(raw, text)
    return shortened(settings, options.steps), profiles.convert(raw)


def pace(settings: Run, *, profile: str | None, from_run: Path | None) -> Rates:
    """How fast a run would be with the costs of a finished run, or else of a file."""
    if from_run is not None:
        directory = RunDirectory.open(from_run)
        costs = calibrate(directory, from_yaml(directory.config))
    else:
        costs = profiles.convert(profiles.read(_profile(str(profile))))
    return simulate(shortened(settings, None), costs, warm_up=warm_up(settings)).rates


def _profile(name: str) -> Path:
    """A file, or the name of one in configs/profile."""
    shipped = {path.stem: path for path in (CONFIGS / "profile").glob("*.yaml")}
    if name not in shipped and not Path(name).exists():
        raise ConfigError(f"--profile {name} is no file and not shipped: {did_you_mean(name, shipped)}")
    return shipped.get(name, Path(name))


def _override(raw: dict[str, Any], text: str) -> None:
    key, _, value = text.removeprefix(PREFIX).partition("=")
    *path, field = key.split(".")
    for name in path:
        below = raw.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{text}: {PREFIX}{name} is a single value and has no fields")
        raw = cast(dict[str, Any], below)
    try:
        raw[field] = msgspec.yaml.decode(value.encode())
    except msgspec.DecodeError:
        raise ConfigError(f"cannot read {text!r}: write {PREFIX}key=value") from None


def _one(settings: Run, profile: Profile, options: Options) -> Outcome:
    """The split as configured, or as requested."""
    if options.gpus is None:
        return simulate(settings, profile, trainer_gpus=options.trainer_gpus, warm_up=warm_up(settings))
    profile = msgspec.structs.replace(profile, sharing=Sharing())  # GPUs of their own
    trainer_gpus = options.trainer_gpus or 0
    engines = (options.gpus - trainer_gpus) // profile.engine.gpus
    if trainer_gpus < 1 or engines < 1:
        raise ConfigError(
            f"--trainer-gpus {trainer_gpus} of --gpus {options.gpus} leaves no engine of "
            f"{profile.engine.gpus} GPUs, or no trainer"
        )
    return simulate(settings, profile, engines=engines, trainer_gpus=trainer_gpus, warm_up=warm_up(settings))


def _writable(path: Path, option: str) -> Path:
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{option} {path} is not a file that can be written")
    return path


def _show(console: Console, settings: Run, found: Sizing | Outcome) -> None:
    if not console.is_terminal:
        console.width = 200
    outcomes = found.splits if isinstance(found, Sizing) else (found,)
    best = found.splits[found.best] if isinstance(found, Sizing) else None
    console.print(f"{MARK}: {outcomes[0].gpus} GPUs", style="bold")
    console.print(
        f"1 step = {settings.flow.groups_per_step} prompts x {settings.rollout.group_size} samples, "
        f"max_staleness={settings.max_staleness}; {settings.steps} steps after {warm_up(settings)} to warm up"
    )
    columns = ("rollout : trainer", "engines", "step s", "samples/s", "tokens/s", "trainer waits", "engines idle")
    table = Table(*columns, "batch", "staleness mean, max", "dropped", title="simulated", title_justify="left")
    for outcome in outcomes:
        table.add_row(*_cells(outcome, marked=outcome is best))
    console.print(table)
    for sentence in _notes(outcomes, best, settings):
        console.print(sentence, soft_wrap=True)


def _cells(outcome: Outcome, *, marked: bool) -> list[str]:
    rates = outcome.rates
    return [
        f"{outcome.rollout_gpus} : {outcome.trainer_gpus}{' (best)' * marked}",
        str(outcome.engines),
        f"{rates.step_seconds:.4g}",
        f"{rates.samples_per_second:.4g}",
        f"{rates.tokens_per_second:,.0f}",
        f"{rates.trainer_wait:.0%}",
        f"{rates.rollout_idle:.0%}",
        f"{rates.batch_mean:.3g}",
        f"{rates.staleness_mean:.2f}, {rates.staleness_max}",
        ", ".join(f"{count} {reason}" for reason, count in outcome.dropped.items()) or "none",
    ]


def _notes(outcomes: Sequence[Outcome], best: Outcome | None, settings: Run) -> list[str]:
    notes = [text for outcome in outcomes for text in outcome.resizes]
    if best is not None:
        rates = best.rates
        notes.append(
            f"best of the splits that were simulated: {best.rollout_gpus} GPUs for {best.engines} engines, "
            f"{best.trainer_gpus} for the trainer; {rates.samples_per_second:.4g} samples/s"
        )
        if min(rates.trainer_wait, rates.rollout_idle) > BOTH_WAIT:
            notes.append(
                f"both sides wait there, for the longest completions: max_staleness={settings.max_staleness} leaves no "
                "more room to run ahead, and other GPUs would not help"
            )
    if any(outcome.short_of_memory for outcome in outcomes):
        notes.append(f"buffer.max_bytes={settings.buffer.max_bytes} kept groups from being admitted: raise it")
    if any(DropReason.TIMEOUT in outcome.dropped for outcome in outcomes):
        notes.append(f"flow.group_timeout_s={settings.flow.group_timeout_s:g} dropped groups: raise it")
    return notes


def _picture(path: Path, found: Sizing | Outcome) -> None:
    """Throughput against the split, and who waits."""
    objects = require("plotly.graph_objects", extra="plots")
    outcomes = found.splits if isinstance(found, Sizing) else (found,)
    engines = [outcome.rollout_gpus for outcome in outcomes]
    rates = [outcome.rates for outcome in outcomes]
    figure: Any = objects.Figure()
    curves = {
        "samples/s": ([each.samples_per_second for each in rates], "y"),
        "trainer waits": ([each.trainer_wait for each in rates], "y2"),
        "engines idle": ([each.rollout_idle for each in rates], "y2"),
    }
    for name, (values, axis) in curves.items():
        figure.add_trace(objects.Scatter(x=engines, y=values, name=name, yaxis=axis, mode="lines+markers"))
    title = f"{MARK}: {outcomes[0].gpus} GPUs"
    figure.update_layout(
        title=escape(title),
        template="plotly_white",
        xaxis={"title": "GPUs for engines"},
        yaxis={"title": "samples per second, simulated", "rangemode": "tozero"},
        yaxis2={"title": "share of time", "overlaying": "y", "side": "right", "range": [0, 1], "showgrid": False},
    )
    replace(path, figure.to_html(include_plotlyjs=True, config={"displaylogo": False}).encode())
