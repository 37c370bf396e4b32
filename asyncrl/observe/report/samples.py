"""A few hundred completions for the sample viewer, with the text of each of their tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Played(NamedTuple):
    """An episode, as `raw_episodes` has it."""

    branches: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    tools_seconds: float
    model_seconds: float
    wasted_tokens: int


def samples(run: Recorded) -> dict[str, Any] | None:
    """None where no completion is recorded."""
    if not len(run.completions["reward"]):
        return None
    kinds = _choose(run)
    wanted = sorted({index for _, _, chosen in kinds for index in chosen})
    decode = _decoder(run)
    group, sample = (run.completions[name] for name in ("group_id", "sample"))
    stored = _read(run, [(int(group[index]), int(sample[index])) for index in wanted])
    gaps, episodes = _gaps(run), _episodes(run, list(stored))
    place: dict[int, int] = {}
    told: list[dict[str, Any]] = []
    budget = TOKENS
    for index in (i for each in zip_round([chosen for _, _, chosen in kinds]) for i in each):
        key = (int(group[index]), int(sample[index]))
        if index in place or key not in stored:
            continue
        one = _sample(run, index, stored[key], gaps.get(key), decode, episodes.get(key))
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


def _episodes(run: Recorded, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], Played]:
    groups = ", ".join(f"({group}, {sample})" for group, sample in wanted)
    columns = "group_id, sample, branches, turns, tools_seconds, model_seconds, wasted_tokens"
    if not groups:
        return {}
    found = run.connection.view("raw_episodes").filter(f"(group_id, sample) IN ({groups})").project(columns)
    return {(group, sample): Played(*rest) for group, sample, *rest in found.fetchall()}


def _marks(episode: Played, first: int, end: int) -> list[dict[str, Any]]:
    """Where turns begin and end and where branches do, counted from token `first`."""
    turns = {turn["start"]: (number, turn) for number, turn in enumerate(episode.turns)}
    branches = {branch["start"]: branch for branch in episode.branches}
    starts = sorted({first, *turns, *(turn["stop"] for turn in episode.turns), *branches})
    found: list[dict[str, Any]] = []
    for start in starts:
        if not first <= start < end:
            continue
        title, role = "harness", "harness"
        if start in turns:
            number, turn = turns[start]
            own = f", reward {turn['reward']:g}" if turn["reward"] else ""
            calls = f", {turn['tool_calls']} tool calls" if turn["tool_calls"] else ""
            title, role = f"model, turn {number + 1}{calls}{own}", "model"
        mark: dict[str, Any] = {"at": start - first, "title": title, "role": role}
        if start in branches:
            mark["branch"] = _branch(branches[start], episode)
        found.append(mark)
    return found


def _branch(branch: dict[str, Any], episode: Played) -> str:
    after = branch["after"]
    turn = sum(turn["start"] <= after for turn in episode.turns)
    where = f"in or after turn {turn}" if turn else "in the prompt"
    goes_on = f"from token {after}, {where}" if after >= 0 else "from nothing"
    return f"branch ({branch['cause'].replace('_', ' ') or 'no cause given'}): goes on {goes_on}"


def _facts(episode: Played, seconds: float) -> dict[str, str]:
    tools, model = episode.tools_seconds, episode.model_seconds
    return {
        "turns": str(len(episode.turns)),
        "tool calls": str(sum(turn["tool_calls"] for turn in episode.turns)),
        "branches": str(len(episode.branches)),
        "time in model, tools, waiting": f"{model:.1f} s, {tools:.1f} s, {max(0.0, seconds - model - tools):.1f} s",
        "tokens of calls cut off": str(episode.wasted_tokens or ""),
    }


def _gaps(run: Recorded) -> dict[tuple[int, int], list[float]]:
    """log pi - log mu of each sampled token, of the completions that the trainer has told of."""
    return {(e["group"], e["sample"]): e["log_ratio"] for e in run.events if e["kind"] == "off_policy"}


def _sample(
    run: Recorded,
    index: int,
    stored: tuple[Any, Any, Any, str, Any],
    gaps: Sequence[float | None] | None,
    decode: Callable[[list[int]], str],
    episode: Played | None,
) -> dict[str, Any]:
    tokens, logprobs, versions, uid, parts = stored
    sampled = next((i for i, version in enumerate(versions) if version != GIVEN), len(versions))
    if episode is not None:
        sampled = min([sampled, *(branch["start"] for branch in episode.branches)])
    marks = [] if episode is None else _marks(episode, sampled, len(versions))
    pieces = texts(list(tokens[sampled:]), decode)
    versions, logprobs = list(versions[sampled:]), [round(value, 3) for value in logprobs[sampled:]]
    left_out = max(0, len(pieces) - HEAD - TAIL)
    if gaps is not None:
        told = iter(gaps)
        gaps = [None if version == GIVEN else next(told, None) for version in versions]
    if left_out:
        pieces, versions, logprobs = (_ends(column) for column in (pieces, versions, logprobs))
        gaps = _ends(gaps) if gaps is not None else None
        marks = _left(marks, left_out)
    completions = run.completions
    siblings = completions["reward"][completions["group_id"] == completions["group_id"][index]]
    step = completions["step"][index]
    seconds = float(completions["finished"][index] - completions["started"][index])
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
        "seconds": seconds,
        "group": int(completions["group_id"][index]),
        "sample": int(completions["sample"][index]),
        "pieces": pieces,
        "logprobs": logprobs,
        "gaps": gaps,
        "runs": [[i, version] for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]],
        "cut": HEAD if left_out else -1,
        "left_out": left_out,
        **({} if episode is None else {"marks": marks, "episode": _facts(episode, seconds)}),
    }


def _finish(run: Recorded, index: int) -> str:
    words = {"stop": "its own end", "length": "the limit of tokens"}
    return words.get(str(run.completions["finish"][index]), "")


def _ends(column: list[Any]) -> list[Any]:
    return column[:HEAD] + column[-TAIL:]


def _left(marks: list[dict[str, Any]], left_out: int) -> list[dict[str, Any]]:
    """Those of what is shown; the last one of what is not says what the rest begins in."""
    head = [mark for mark in marks if mark["at"] < HEAD]
    hidden = [mark for mark in marks if HEAD <= mark["at"] < HEAD + left_out]
    tail = [mark | {"at": mark["at"] - left_out} for mark in marks if mark["at"] >= HEAD + left_out]
    return [*head, *(mark | {"at": HEAD} for mark in hidden[-1:]), *tail]


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
