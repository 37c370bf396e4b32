"""What asynchrony costs in samples and gives in seconds: held-out score against both, over seeds.

    python -m benchmarks.learning                                         the quickstart: sync, staleness 1, 2, 4, 8
    python -m benchmarks.learning --staleness 0 2 8 --corrections default token_tis none --seeds 0 1
    python -m benchmarks.learning --words models/smollm2 --samples 40960 --seeds 0 1    long-tailed completions, a GPU

Every run has the same samples, and is evaluated after each `--every` steps. The area is the mean held-out score over
the samples of a run, 1 at most: what is lost in the middle counts, and what is made up at the end. Seconds are those of
training, evaluations left out. Behind each mean stands the spread over seeds (largest minus smallest).
A picture of all curves is written beside the runs. Finished runs are kept (`benchmarks.studies`).
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.corrections import presets
from benchmarks.longtail import WORDS
from benchmarks.runs import Point, curve, reached
from benchmarks.studies import Study, add_options

SYNC = "sync"
DEFAULT = "default"
QUARTERS = 0.25, 0.5, 0.75, 1.0
COLOURS = "#111111", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22"
WIDTH, HEIGHT, EDGE = 560, 360, 44


class Measured(NamedTuple):
    """One run."""

    area: float
    quarters: tuple[float, ...]
    """The score after these parts of the samples."""
    samples: float | None
    """To the score that was asked for; None if it was never reached."""
    seconds: float | None


def arms(staleness: Sequence[int], corrections: Sequence[str]) -> dict[str, list[str]]:
    """A synchronous run has one correction: the default."""
    found: dict[str, list[str]] = {}
    for steps in staleness:
        for correction in corrections if steps else [DEFAULT]:
            name = f"staleness {steps}" if steps else SYNC
            settings = [f"max_staleness={steps}"]
            if correction != DEFAULT:
                name, settings = f"{name}, {correction}", [*settings, f"correction={correction}"]
            found[name] = settings
    return found


def measured(points: Sequence[Point], score: float) -> Measured:
    total = points[-1].samples
    parts = [(b.samples - a.samples) * (a.held_out + b.held_out) / 2 for a, b in pairwise(points)]
    hit = reached(points, score)
    return Measured(
        area=sum(parts) / total,
        quarters=tuple(_at(points, share * total) for share in QUARTERS),
        samples=None if hit is None else float(hit.samples),
        seconds=None if hit is None else hit.seconds,
    )


def _at(points: Sequence[Point], samples: float) -> float:
    """The score after so many samples, between two evaluations in proportion."""
    for before, after in pairwise(points):
        if before.samples <= samples <= after.samples:
            share = (samples - before.samples) / (after.samples - before.samples)
            return before.held_out + share * (after.held_out - before.held_out)
    return points[-1].held_out


def _spread(values: Sequence[float], form: str) -> str:
    return f"{mean(values):{form}} ({max(values) - min(values):{form}})" if len(values) > 1 else f"{values[0]:{form}}"


def _to(values: Sequence[float | None], reference: float | None, form: str) -> str:
    """The mean, and how many times that of sync."""
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return f"reached by {len(there)} of {len(values)}"
    times = "" if not reference else f", {mean(there) / reference:.2f}x"
    return _spread(there, form) + times


def table(curves: dict[str, list[list[Point]]], score: float) -> str:
    shares = " | ".join(f"{share:.0%}" for share in QUARTERS)
    lines = [f"| | seeds | area | {shares} | samples to {score:g} | seconds to {score:g} |", "|---" * 9 + "|"]
    sync: list[Measured] = [measured(points, score) for points in curves.get(SYNC, [])]
    samples, seconds = (
        None if not sync or None in column else mean(value for value in column if value is not None)
        for column in ([run.samples for run in sync], [run.seconds for run in sync])
    )
    for arm, runs in curves.items():
        found = [measured(points, score) for points in runs]
        other = arm != SYNC
        quarters = " | ".join(f"{mean(run.quarters[n] for run in found):.3f}" for n in range(len(QUARTERS)))
        area = _spread([run.area for run in found], ".3f")
        if other and sync:
            area += f", {100 * (mean(run.area for run in found) - mean(run.area for run in sync)):+.1f} points"
        lines.append(
            f"| {arm} | {len(runs)} | {area} | {quarters} | "
            f"{_to([run.samples for run in found], samples if other else None, ',.0f')} | "
            f"{_to([run.seconds for run in found], seconds if other else None, '.1f')} |"
        )
    return "\n".join(lines)


def picture(curves: dict[str, list[list[Point]]]) -> str:
    """Two panels of one page: thin lines are seeds, thick ones their mean where all were evaluated."""
    panels = [
        _panel(curves, "samples", lambda p: p.samples),
        _panel(curves, "seconds of training", lambda p: p.seconds),
    ]
    names = "".join(
        f'<span style="color:{COLOURS[number % len(COLOURS)]};margin-right:1.5em">&#9644; {arm}</span>'
        for number, arm in enumerate(curves)
    )
    return (
        '<!doctype html><meta charset="utf-8"><title>Learning</title>'
        f'<body style="font-family:sans-serif"><h1>Held-out score</h1><p>{names}</p>{"".join(panels)}</body>\n'
    )


def _panel(curves: dict[str, list[list[Point]]], label: str, x: Callable[[Point], float]) -> str:
    most = max(x(points[-1]) for runs in curves.values() for points in runs)

    def place(at: float, score: float) -> str:
        return f"{EDGE + at / most * (WIDTH - 2 * EDGE):.1f},{HEIGHT - EDGE - score * (HEIGHT - 2 * EDGE):.1f}"

    lines: list[str] = []
    for number, runs in enumerate(curves.values()):
        colour = COLOURS[number % len(COLOURS)]
        average = [
            (mean(x(run[n]) for run in runs), mean(run[n].held_out for run in runs)) for n in range(min(map(len, runs)))
        ]
        drawn = [([(x(point), point.held_out) for point in points], 0.8, 0.35) for points in runs]
        for line, width, opacity in [*drawn, (average, 2.2, 1.0)]:
            path = " ".join(place(*point) for point in line)
            lines.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"/>'
            )
    ticks = "".join(
        f'<text x="4" y="{HEIGHT - EDGE - score * (HEIGHT - 2 * EDGE) + 4:.0f}" font-size="11">{score:g}</text>'
        for score in (0, 0.25, 0.5, 0.75, 1)
    )
    end = f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 24}" font-size="11" text-anchor="end">{most:,.0f} {label}</text>'
    frame = f'<path d="M{EDGE},{EDGE} V{HEIGHT - EDGE} H{WIDTH - EDGE}" fill="none" stroke="#999"/>'
    return f'<svg width="{WIDTH}" height="{HEIGHT}">{frame}{ticks}{end}{"".join(lines)}</svg>'


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="for all runs")
    add_options(parser, "runs/learning")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8], metavar="STEPS", help="0 is sync")
    parser.add_argument("--corrections", nargs="+", choices=[DEFAULT, *presets()], default=[DEFAULT], metavar="PRESET")
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--prompts", type=int, default=512, help="of an evaluation")
    parser.add_argument("--score", type=float, default=0.85, help="that samples and seconds are counted to")
    parser.add_argument("--words", type=Path, metavar="MODEL", help="this model on the long-tailed lists, on a GPU")
    parser.add_argument("--samples", type=int, metavar="N", help="of a run, instead of --steps")
    return parser.parse_intermixed_args(words)


def common(options: argparse.Namespace) -> list[str]:
    evaluation = [f"evaluation.every={options.every}", f"evaluation.prompts={options.prompts}"]
    rest = ["checkpoint.every=0", "checkpoint.last=false", "sentinel.max_kl=0", *options.settings]
    if options.words is None:
        return ["experiment=quickstart", "engine=native", f"steps={options.steps}", *evaluation, *rest]
    steps = options.samples // 512 if options.samples else options.steps
    return [
        *("experiment=smollm2", f"model.path={options.words.resolve()}", *WORDS, "engine=native", "engine.device=cuda"),
        *(f"steps={steps}", f"trainer.decay_steps={steps // 3}", "flow.groups_per_take=16", *evaluation, *rest),
    ]


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    study = Study(options.root, common=common(options))
    if options.words is None:
        study.start(options.seeds)
    wanted = arms(options.staleness, options.corrections)
    study.run(wanted, options.seeds, common(options), options.jobs)
    curves = {
        arm: [curve(study.directory(arm, seed), options.every) for seed in study.finished(arm, options.seeds)]
        for arm in wanted
    }
    there = {arm: runs for arm, runs in curves.items() if runs}
    if there:
        page = study.root / "learning.html"
        page.write_text(picture(there))
        print(f"{table(there, options.score)}\n\npicture: {page}")


if __name__ == "__main__":
    main()
