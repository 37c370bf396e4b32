"""A few hundred completions for the sample viewer, with the text of each of their tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from asyncrl.observe.report.recorded import Recorded
from asyncrl.observe.report.timeline import fate
from asyncrl.types import GIVEN

EACH = 40
"""Completions of each kind."""
TOKENS = 150_000
"""Of all samples together: the page stays small, whatever the run."""
HEAD, TAIL = 1500, 500
"""Tokens that are shown of a long completion, from its beginning and its end."""
PREVIEW = 60
INCOMPLETE = "�"


def samples(run: Recorded) -> dict[str, Any] | None:
    """None where no completion is recorded."""
    if not len(run.completions["reward"]):
        return None
    kinds = _choose(run)
    wanted = sorted({index for _, _, chosen in kinds for index in chosen})
    decode = _decoder(run)
    group, sample = (run.completions[name] for name in ("group_id", "sample"))
    stored = _read(run, [(int(group[index]), int(sample[index])) for index in wanted])
    gaps = _gaps(run)
    place: dict[int, int] = {}
    told: list[dict[str, Any]] = []
    budget = TOKENS
    for index in (i for each in zip_round([chosen for _, _, chosen in kinds]) for i in each):
        key = (int(group[index]), int(sample[index]))
        if index in place or key not in stored:
            continue
        one = _sample(run, index, stored[key], gaps.get(key), decode)
        if (budget := budget - len(one["pieces"])) < 0:
            break
        place[index] = len(told)
        told.append(one)
    shown = [
        {"name": name, "title": title, "samples": [place[index] for index in chosen if index in place]}
        for name, title, chosen in kinds
    ]
    return {"kinds": [kind for kind in shown if kind["samples"]], "samples": told}


def zip_round(lists: Sequence[list[int]]) -> list[list[int]]:
    """The first of every list, then the second, ...: what does not fit is missing from all alike."""
    return [[each[turn] for each in lists if turn < len(each)] for turn in range(max(map(len, lists), default=0))]


def _choose(run: Recorded) -> list[tuple[str, str, list[int]]]:
    completions = run.completions
    reward, tokens = completions["reward"], completions["answer_tokens"]
    newest = np.arange(len(reward))[::-1]
    age = np.ma.filled(np.ma.asarray(completions["staleness"], np.float64), -1.0)
    dropped = newest[np.ma.filled(np.ma.asarray(completions["fate"] == "dropped"), False)[newest]]
    measured = set(_gaps(run))
    keys = zip(completions["group_id"].tolist(), completions["sample"].tolist(), strict=True) if measured else ()
    off = [index for index, key in enumerate(keys) if key in measured][::-1]

    def first(order: Any) -> list[int]:
        return [int(index) for index in newest[np.argsort(order[newest], kind="stable")][:EACH]]

    return [
        ("newest", "finished last", newest[:EACH].tolist()),
        ("best", "with the highest rewards, newest first", first(-reward)),
        ("worst", "with the lowest rewards, newest first", first(reward)),
        ("longest", "with most tokens", first(-tokens)),
        ("stalest", "trained on with the oldest tokens", [i for i in first(-age) if age[i] > 0]),
        ("dropped", "never trained on", dropped[:EACH].tolist()),
        (
            "off-policy",
            "the one of each step whose log-probabilities differ most between trainer and engine",
            off[:EACH],
        ),
    ]


def _read(run: Recorded, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], tuple[Any, Any, Any, str, Any]]:
    """Tokens, log-probabilities, versions, prompt id and parts of the reward."""
    groups = ", ".join({f"({group}, {sample})" for group, sample in wanted})
    columns = "group_id, sample, tokens, logprobs, versions, prompt, parts"
    found = run.connection.view("trajectories").filter(f"(group_id, sample) IN ({groups})").project(columns)
    return {(group, sample): tuple(stored) for group, sample, *stored in found.fetchall()}


def _gaps(run: Recorded) -> dict[tuple[int, int], list[float]]:
    """log pi - log mu of each sampled token, of the completions that the trainer has told of."""
    return {(e["group"], e["sample"]): e["log_ratio"] for e in run.events if e["kind"] == "off_policy"}


def _sample(
    run: Recorded,
    index: int,
    stored: tuple[Any, Any, Any, str, Any],
    gaps: Sequence[float | None] | None,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    tokens, logprobs, versions, uid, parts = stored
    sampled = next((i for i, version in enumerate(versions) if version != GIVEN), len(versions))
    pieces = texts(list(tokens[sampled:]), decode)
    versions, logprobs = list(versions[sampled:]), [round(value, 3) for value in logprobs[sampled:]]
    left_out = max(0, len(pieces) - HEAD - TAIL)
    if gaps is not None:
        told = iter(gaps)
        gaps = [None if version == GIVEN else next(told, None) for version in versions]
    if left_out:
        pieces, versions, logprobs = (_ends(column) for column in (pieces, versions, logprobs))
        gaps = _ends(gaps) if gaps is not None else None
    completions = run.completions
    siblings = completions["reward"][completions["group_id"] == completions["group_id"][index]]
    step = completions["step"][index]
    return {
        "reward": float(completions["reward"][index]),
        "parts": parts or {},
        "above": float(f"{completions['reward'][index] - siblings.mean():.4g}") if len(siblings) > 1 else None,
        "tokens": int(completions["answer_tokens"][index]),
        "preview": "".join(pieces)[:PREVIEW].replace("\n", " "),
        "prompt": "".join(texts(list(tokens[:sampled][: HEAD + TAIL]), decode)),
        "uid": uid,
        "fate": fate(run, index)
        + ("" if step is np.ma.masked or fate(run, index) != "trained" else f" in step {int(step) + 1}"),
        "finish": _finish(run, index),
        "age": None if completions["staleness"][index] is np.ma.masked else int(completions["staleness"][index]),
        "engine": str(completions["engine"][index]),
        "seconds": float(completions["finished"][index] - completions["started"][index]),
        "group": int(completions["group_id"][index]),
        "sample": int(completions["sample"][index]),
        "pieces": pieces,
        "logprobs": logprobs,
        "gaps": gaps,
        "runs": [[i, version] for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]],
        "cut": HEAD if left_out else -1,
        "left_out": left_out,
    }


def _finish(run: Recorded, index: int) -> str:
    words = {"stop": "its own end", "length": "the limit of tokens"}
    return words.get(str(run.completions["finish"][index]), "")


def _ends(column: list[Any]) -> list[Any]:
    return column[:HEAD] + column[-TAIL:]


def texts(tokens: list[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text that each token adds. Several tokens can be one character: the last of them has it."""
    pieces: list[str] = []
    before = begin = 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[before:end])
        if text.endswith(INCOMPLETE) and end < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(decode(tokens[before:begin])) :])
        before, begin = begin, end
    return pieces


def _decoder(run: Recorded) -> Callable[[list[int]], str]:
    """From the tokenizer that lies in the run's directory or beside its model; ids in brackets where there is none."""
    places = [run.directory.model, *run.directory.checkpoints.glob("step-*")]
    places.append(Path(str(run.setting("model.path", ""))).expanduser())
    file = next((file for place in places if (file := place / "tokenizer.json").is_file()), None)
    if file is not None:
        backend = tokenizers.Tokenizer.from_file(str(file))
        return lambda ids: backend.decode(ids, skip_special_tokens=False)
    return lambda ids: "".join(f"[{token}]" for token in ids)
