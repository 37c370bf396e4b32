"""The report as data, and the one file that shows it.

The file asks for nothing: style, script and data are in it, and its policy allows this one script and this one style
by their hashes. Data come from models and users, so they are JSON in which no tag can begin, read by the script and
shown as text.
"""

import base64
import hashlib
import time
from importlib.resources import files
from typing import Any

import jinja2
import msgspec

import asyncrl
from asyncrl.buffer.retention import read_pruned
from asyncrl.observe.report import curves
from asyncrl.observe.report.agents import agents
from asyncrl.observe.report.figures import Found
from asyncrl.observe.report.headline import Figures, headline
from asyncrl.observe.report.judge import cost, judge
from asyncrl.observe.report.prompts import prompts
from asyncrl.observe.report.recorded import Recorded
from asyncrl.observe.report.samples import samples
from asyncrl.observe.report.timeline import timeline
from asyncrl.observe.report.waste import useful, waste

# The figures that are asked for first.


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
    if (spent := cost(run)) is not None:
        told.append(("judge", *spent))
    if run.attempts > 1:
        told.append(("attempts", str(run.attempts), "actors placed anew after a death or a resume"))
    return [{"label": label, "value": value, "note": note} for label, value, note in told]


def _held_out(found: Found) -> list[tuple[str, str, str]]:
    scores = found.run.connection.execute("SELECT sampled FROM evaluations ORDER BY step").fetchall()
    if not scores:
        return []
    return [("held-out", f"{scores[0][0]:.1%} → {scores[-1][0]:.1%}", "right completions, sampled")]


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


SCRIPTS = ("dom.js", "charts.js", "timeline.js", "details.js", "samples.js", "main.js")
LABELS = {
    "training": "training",
    "generation": "waited for completions",
    "tail": "waited for the last completions",
    "reward": "waited for rewards",
    "sync": "waited for weights",
    "checkpoint": "checkpoints",
    "other": "other",
}
TONES = {"ok": "good", "running": "warn", "interrupted": "warn", "failed": "bad", "killed": "bad"}
STATES = {"ok": "finished", "running": "still going on"}
TOLD = (
    *(
        "alarm",
        "step_skipped",
        "engine_lost",
        "restart",
        "pool_resized",
        "drafting",
        "drafter_lost",
        "drafter_failed",
        "stall",
    ),
    *("regenerated", "checkpoint_damaged", "pruned", "function_failed"),
)
"""Events that are listed in words."""
LOG = 500


def document(run: Recorded) -> dict[str, Any]:
    found = Found(run)
    figures = found.figures()
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    pruned = str(read_pruned(run.directory.trajectories) or "")
    return {
        "run": {
            "name": str(run.setting("name", run.directory.path.name)),
            "status": STATES.get(run.status, run.status),
            "tone": TONES.get(run.status, "warn"),
            "when": f"as of {now}: {len(run.rows)} of {run.setting('steps', '?')} steps"
            + (f"; {pruned}" if pruned else ""),
            "trouble": run.trouble,
        },
        "headline": msgspec.to_builtins(headline(figures)),
        "shares": [
            {"label": label, "share": figures.shares[cause], "colour": f"k-{cause}", "detail": ""}
            for cause, label in LABELS.items()
            if figures.shares.get(cause, 0.0) >= 0.0005
        ],
        "tiles": tiles(found, figures),
        "learning": curves.learning(run),
        "prompts": prompts(run),
        "timeline": timeline(found),
        "distributions": curves.distributions(run),
        "correction": curves.correction(run),
        "drafting": curves.drafting(run),
        "agents": agents(run),
        "judge": judge(run),
        "waste": waste(found),
        "memory": curves.memory(run),
        "samples": samples(run),
        "no_samples": "No completion is recorded: none is finished, or buffer.durability=memory keeps none on disk.",
        "environment": _environment(run),
        "log": _log(run),
        "config": run.config_text,
    }


def _environment(run: Recorded) -> list[tuple[str, str]]:
    """Of the last attempt."""
    found = [event["found"] for event in run.events if event["kind"] == "environment"]
    return [(str(name), str(value)) for name, value in found[-1].items()] if found else []


def _log(run: Recorded) -> list[tuple[str, str, str]]:
    begin = run.events[0]["time"] if run.events else 0.0
    told = [event for event in run.events if event["kind"] in TOLD]
    return [
        (f"{event['time'] - begin:,.1f} s", event["kind"].replace("_", " "), _words(event)) for event in told[-LOG:]
    ]


def _words(event: dict[str, Any]) -> str:
    text = next((str(event[name]) for name in ("text", "reason", "fault", "sentence") if event.get(name)), "")
    where = event.get("engine") or (f"version {event['version']}" if "version" in event else "")
    return f"{where}: {text.partition(chr(10))[0]}" if where else text.partition("\n")[0]


def render(found: dict[str, Any]) -> str:
    """The whole page."""
    page = files("asyncrl.observe.report") / "page"
    script = "(() => {\n" + "\n".join((page / name).read_text() for name in SCRIPTS) + "})();\n"
    style = (page / "report.css").read_text()
    template = jinja2.Environment(autoescape=True).from_string((page / "report.html").read_text())
    return template.render(
        title=f"{found['run']['name']} - asyncrl report",
        sentence=found["headline"]["sentence"],
        version=asyncrl.__version__,
        data=embedded(found),
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
    )


def embedded(found: Any) -> str:
    """JSON inside a script element: no tag, comment or end of it can begin in there."""
    text = msgspec.json.encode(found).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
