"""The timeline of the report: what each actor did when, as columns that the page draws."""

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.observe.report.figures import Found
from asyncrl.observe.report.recorded import Recorded
from asyncrl.observe.report.time_breakdown import CAUSES

KINDS = (*CAUSES, "evaluation")
MOMENTS = 120_000
"""Most starts and ends of completions that are kept; of more, every second, third, ... stands for its neighbours."""
LONGEST = 4000
"""Completions that are shown one by one."""
WINDOWS = 400
"""Parts of the run each of which shows its own longest completions."""
SPANS = 60_000
"""Most pieces of the trainer's time: of a longer run the newest."""


def timeline(found: Found) -> dict[str, Any] | None:
    """None for a run without events. Times are seconds since its beginning."""
    run, pieces = found.run, found.pieces
    if not run.events:
        return None
    evaluations = [(e["time"], e["seconds"]) for e in run.events if e["kind"] == "evaluation"]
    firsts = [*pieces.starts[:1].tolist(), *(start for start, _ in evaluations[:1])]
    begin = min(firsts, default=run.events[0]["time"])  # loading models and a warm start come before, and are not shown
    end = max([*(e["time"] + (e.get("seconds") or 0.0) for e in run.events), *found.running.finished[-1:]])
    publications = [e for e in run.events if e["kind"] == "publish"]
    judging = found.judging
    return {
        "seconds": _rounded(end - begin),
        "kinds": KINDS,
        "trainer": _trainer(found, evaluations, begin),
        "steps": [_rounded(row["time"] - begin) for row in run.rows],
        "weights": {
            "start": [_rounded(e["time"] - begin) for e in publications],
            "seconds": [_rounded(e["seconds"]) for e in publications],
            "version": [e["version"] for e in publications],
        },
        "versions": {
            "time": [_rounded(e["time"] + e["seconds"] - begin) for e in publications],
            "version": [e["version"] for e in publications],
        },
        "reward": {
            "start": _numbers(judging["start"] - begin),
            "end": _numbers(judging["end"] - begin),
            "judging": _numbers(judging["judging"]),
            "latency": _numbers(judging["waited"] / np.maximum(judging["judged"], 1)),
            "busy": _numbers(judging["busy"]),
        },
        **_engines(run, begin),
        "note": _note(len(pieces.starts), len(run.completions["started"])),
    }


def _trainer(found: Found, evaluations: list[tuple[float, float]], begin: float) -> dict[str, list[Any]]:
    pieces = found.pieces
    starts = np.concatenate([pieces.starts, [start for start, _ in evaluations]])
    lengths = np.concatenate([pieces.ends - pieces.starts, [seconds for _, seconds in evaluations]])
    kinds = np.concatenate([pieces.causes, np.full(len(evaluations), KINDS.index("evaluation"))])
    order = np.argsort(starts, kind="stable")[-SPANS:]
    return {
        "start": _numbers(starts[order] - begin),
        "seconds": _numbers(lengths[order]),
        "kind": kinds[order].astype(int).tolist(),
    }


def _engines(run: Recorded, begin: float) -> dict[str, Any]:
    completions = run.completions
    engine = completions["engine"].astype(str)
    names = sorted(set(engine.tolist()), key=lambda name: (len(name), name))
    every = max(1, -(-2 * len(engine) // MOMENTS))
    lanes: list[dict[str, Any]] = []
    for name in names:
        started, finished = (np.sort(completions[column][engine == name]) - begin for column in ("started", "finished"))
        running = np.searchsorted(started, started, side="right") - np.searchsorted(finished, started, side="right")
        lanes.append(
            {
                "name": name,
                "every": every,
                "most": max(1, int(running.max(initial=0))),
                "started": _packed(started[every // 2 :: every]),
                "finished": _packed(finished[every // 2 :: every]),
            }
        )
    return {"engines": lanes, "completions": _longest(run, names, engine, begin)}


def _longest(run: Recorded, names: list[str], engine: npt.NDArray[Any], begin: float) -> dict[str, Any]:
    """The longest of each part of the run, so that every tail shows."""
    completions = run.completions
    seconds = completions["finished"] - completions["started"]
    window = np.arange(len(seconds)) * WINDOWS // max(len(seconds), 1)
    order = np.lexsort((-seconds, window))
    firsts = np.searchsorted(window[order], window[order], side="left")
    chosen = np.sort(order[np.arange(len(order)) - firsts < LONGEST // WINDOWS]) if len(order) > LONGEST else order
    place = {name: number for number, name in enumerate(names)}
    return {
        "engine": [place[name] for name in engine[chosen]],
        "start": _numbers(completions["started"][chosen] - begin),
        "seconds": _numbers(seconds[chosen]),
        "group": completions["group_id"][chosen].tolist(),
        "sample": completions["sample"][chosen].tolist(),
        "tokens": completions["answer_tokens"][chosen].tolist(),
        "reward": _numbers(completions["reward"][chosen]),
        "fate": [fate(run, int(index)) for index in chosen],
    }


def fate(run: Recorded, index: int) -> str:
    """What became of a completion, in words; the page looks at their first."""
    completions = run.completions
    match completions["fate"][index]:
        case "trained":
            return "trained"
        case "dropped":
            return f"dropped: {str(completions['drop_reason'][index]).replace('_', ' ')}"
        case _:
            return "waits in the buffer"


def _note(pieces: int, completions: int) -> str:
    notes = [
        f"The trainer's newest {SPANS:,} of {pieces:,} spans are shown." if pieces > SPANS else "",
        f"Of {completions:,} completions, the {LONGEST:,} that were longest in their part of the run are shown one by "
        "one; areas count all."
        if completions > LONGEST
        else "",
    ]
    return " ".join(filter(None, notes))


def _rounded(value: float) -> float:
    return round(float(value), 4)


def _numbers(values: npt.NDArray[Any]) -> list[float | None]:
    return [float(f"{value:.8g}") if np.isfinite(value) else None for value in values.tolist()]


def _packed(values: npt.NDArray[Any]) -> str:
    """Little-endian float32, which the page maps as they are."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
