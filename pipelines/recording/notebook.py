"""What a notebook shows: a small picture of a run, redrawn while it goes on."""

from collections.abc import Mapping, Sequence
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from asyncrl.config import Run
from asyncrl.system.optional import require
from pipelines.recording.plot import Curve
from pipelines.recording.progress import Progress

if TYPE_CHECKING:
    from pipelines.evaluate import Scores

WIDTH, HEIGHT, MARGIN = 560, 180, 36
COLOURS = ("#1f77b4", "#d95f02", "#2a9d5c", "#9467bd")


def make_progress(run: Run) -> Progress:
    """For a notebook or a terminal, whichever this process writes to."""
    console = Console(highlight=False)
    return NotebookProgress(run, console) if console.is_jupyter else Progress(run, console)


def picture(curves: Mapping[str, Curve]) -> str:
    """An SVG of a few figures over the steps, all on one scale; it needs no network and no script."""
    points = {
        name: [(x, y) for x, y in zip(curve.steps, curve.values, strict=True) if y is not None]
        for name, curve in curves.items()
    }
    xs = [x for line in points.values() for x, _ in line] or [0]
    ys = [y for line in points.values() for _, y in line] or [0.0]
    low, high = min(*ys, 0.0), max(*ys, 1e-9)
    right, top = WIDTH - MARGIN, MARGIN

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - min(xs)) / max(max(xs) - min(xs), 1)
        return MARGIN + across * (right - MARGIN), HEIGHT - MARGIN - (y - low) / (high - low) * (HEIGHT - 2 * top)

    lines = [_line(name, [place(*point) for point in line], i) for i, (name, line) in enumerate(points.items())]
    base, ceiling = place(min(xs), low)[1], place(min(xs), high)[1]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="currentColor"><path d="M{MARGIN} {ceiling:g}V{base:g}H{right}" fill="none" '
        f'stroke="currentColor" opacity=".4"/><text x="2" y="{base:g}">{low:.3g}</text>'
        f'<text x="2" y="{ceiling:g}">{high:.3g}</text><text x="{right}" y="{base + 18:g}" text-anchor="end">'
        f"step {max(xs)}</text>{''.join(lines)}</svg>"
    )


def _line(name: str, places: Sequence[tuple[float, float]], number: int) -> str:
    colour = COLOURS[number % len(COLOURS)]
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    label = f'<text x="{MARGIN + 120 * number}" y="16" fill="{colour}">{escape(name)}</text>'
    return f'{label}<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>{dots}'


class NotebookProgress(Progress):
    """One output that is redrawn at every step, and lines that stay above it."""

    def __init__(self, run: Run, console: Console) -> None:
        super().__init__(run, console)
        self._rewards: dict[int, float] = {}
        self._latest: dict[str, str] = {}
        self._html: Any = None
        self._shown: Any = None

    def __enter__(self) -> "NotebookProgress":
        ipython = require("IPython.display", extra="notebook")
        self._html = ipython.HTML
        self._shown = ipython.display(self._html(""), display_id=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def evaluation(self, steps_done: int, scores: "Scores") -> None:
        super().evaluation(steps_done, scores)
        self._redraw()

    def step(self, row: dict[str, Any]) -> None:
        self._rewards[row["step"] + 1] = row["reward"]
        self._latest = self._figures(row)
        self._previous = row
        self._redraw()

    def _redraw(self) -> None:
        scores = {step: scores.sampled for step, scores in sorted(self._scores.items())}
        curves = {
            name: Curve(list(values), list(values.values()))
            for name, values in (("reward", self._rewards), ("held-out", scores))
        }
        figures = " &nbsp; ".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in self._latest.items())
        self._shown.update(self._html(f"{picture(curves)}<div>{figures}</div>"))
