"""The page that `compare` writes: a table and one picture a metric, every run in each. It works offline."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.errors import ConfigError
from asyncrl.system.optional import require
from asyncrl.system.run_directory import replace

COLUMNS = 2
HEIGHT = 280
"""Of one picture, in pixels."""
GAP = 70
"""Between two pictures, one above the other."""
STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222}table{border-collapse:collapse}"
    "th,td{padding:.2em 1em .2em 0;text-align:left;border-bottom:1px solid #ddd;overflow-wrap:anywhere}"
)


class Curve(NamedTuple):
    """A figure against the number of steps done."""

    steps: list[int]
    values: list[float | None]


def write(
    path: Path, labels: Sequence[str], rows: Mapping[str, Sequence[str]], curves: Mapping[str, Mapping[str, Curve]]
) -> None:
    """`rows`: a cell for each of `labels`. `curves`: by metric, then by label."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--out {path} is not a file that can be written; name one such as compare.html")
    title = escape(" · ".join(labels))
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"</head><body><h1>{title}</h1>{_table(labels, rows)}{_pictures(labels, curves)}</body></html>\n"
    )
    replace(path, page.encode())


def _table(labels: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [("", labels), *rows.items()]
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in lines
    )
    return f"<table>{body}</table>"


def _pictures(labels: Sequence[str], curves: Mapping[str, Mapping[str, Curve]]) -> str:
    objects, subplots = require("plotly.graph_objects", extra="plots"), require("plotly.subplots", extra="plots")
    lines = ceil(len(curves) / COLUMNS)
    height = lines * (HEIGHT + GAP)
    figure: Any = subplots.make_subplots(
        rows=lines, cols=COLUMNS, subplot_titles=list(curves), vertical_spacing=GAP / height, horizontal_spacing=0.08
    )
    colours: Sequence[str] = require("plotly.colors", extra="plots").qualitative.D3
    legends: set[str] = set()
    for place, by_label in enumerate(curves.values()):
        row, column = divmod(place, COLUMNS)
        for label, curve in by_label.items():
            trace = objects.Scatter(
                x=curve.steps,
                y=curve.values,
                name=escape(label),  # plotly reads some tags
                mode="lines+markers" if len(curve.steps) < 20 else "lines",
                line={"color": colours[labels.index(label) % len(colours)]},
                legendgroup=label,
                showlegend=label not in legends,
            )
            figure.add_trace(trace, row=row + 1, col=column + 1)
            legends.add(label)
    figure.update_xaxes(title_text="step", title_standoff=4)
    legend = {"orientation": "h", "y": 1 + GAP / 2 / height, "yanchor": "bottom"}
    figure.update_layout(height=height, template="plotly_white", legend=legend)
    return figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False})
