"""Episodes: their text in the trajectory log, what of them is checked, their figures, and the paths of their trees.

The tokens of a trajectory with branches are a tree: lines of tokens, each of which goes on from the one before it, and
each line from a token of an earlier line, or from nothing. A path is what a call has seen: the tokens from a beginning
to the end of a line that nothing goes on from.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.types import GIVEN, Branch, Episode, Trajectory

MOST = (1 << 31) - 1
"""Of what is counted."""
Places = npt.NDArray[np.int64]
Runs = Sequence[tuple[int, int, int]]
"""Start, stop and version of each run of tokens with one version."""
_decoder = msgspec.json.Decoder(Episode)


def to_text(episode: Episode) -> str:
    """JSON: arrays without names, about as short as msgpack, and SQL reads it."""
    return msgspec.json.encode(episode).decode()


def from_text(text: str) -> Episode:
    """ValueError with what is wrong with it."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"episode={text!r:.100}: {error}") from None


def complaint(episode: Episode, runs: Runs) -> str | None:
    """What is wrong with an episode of these tokens."""
    tokens = runs[-1][1]
    starts = [0, *(branch.start for branch in episode.branches), tokens]
    if any(start >= stop for start, stop in pairwise(starts)):
        return f"branches begin at {starts[1:-1]}: not one behind the other within its {tokens} tokens"
    if wrong := next((branch for branch in episode.branches if not -1 <= branch.after < branch.start), None):
        return f"the branch at {wrong.start} goes on from {wrong.after}, which is no token before it"
    bounds = [0, *(place for turn in episode.turns for place in (turn.start, turn.stop)), tokens]
    if any(start > stop for start, stop in pairwise(bounds)):
        return f"turns begin and end at {bounds[1:-1]}: not one behind the other within its {tokens} tokens"
    sampled = np.zeros(tokens, np.bool_)
    for start, stop, version in runs:
        sampled[start:stop] = version != GIVEN
    inside = np.zeros(tokens, np.bool_)
    for turn in episode.turns:
        inside[turn.start : turn.stop] = True
        if split := next((s for s in starts[1:-1] if turn.start < s < turn.stop), None):
            return f"a branch begins at {split}, inside the turn from {turn.start} to {turn.stop}"
    if not np.array_equal(sampled, inside):
        return "its turns are not its sampled tokens"
    roots = [0, *(branch.start for branch in episode.branches if branch.after < 0)]
    if sampled[roots].any():
        return "a token was sampled after nothing"
    counts = [episode.wasted_tokens, *(turn.tool_calls for turn in episode.turns)]
    numbers = [episode.model_s, episode.tools_s, *(turn.reward for turn in episode.turns)]
    if not all(map(isfinite, numbers)) or min(episode.model_s, episode.tools_s) < 0:
        return "seconds and rewards of turns must be finite, and seconds not negative"
    if not all(0 <= count <= MOST for count in counts):
        return f"tool calls and wasted tokens must be 0 to {MOST}"
    return None


# Figures.


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the samples of harnesses."""

    episodes: int = 0
    turns: int = 0
    tool_calls: int = 0
    seconds: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0
    wasted_tokens: int = 0
    branches: dict[str, int] = {}
    """By cause."""


def played(trajectories: Iterable[Trajectory]) -> Played:
    own = [(t, t.episode) for t in trajectories if t.episode is not None]
    return Played(
        episodes=len(own),
        turns=sum(len(episode.turns) for _, episode in own),
        tool_calls=sum(turn.tool_calls for _, episode in own for turn in episode.turns),
        seconds=sum(trajectory.finished - trajectory.started for trajectory, _ in own),
        model_s=sum(episode.model_s for _, episode in own),
        tools_s=sum(episode.tools_s for _, episode in own),
        wasted_tokens=sum(episode.wasted_tokens for _, episode in own),
        branches=Counter(branch.cause for _, episode in own for branch in episode.branches),
    )


def agent_figures(parts: Iterable[Played]) -> dict[str, Any]:
    """The column of a step's metrics: means over its episodes, shares of their seconds, and sums of what was lost. No
    column without episodes."""
    found = list(parts)
    episodes, seconds = sum(each.episodes for each in found), sum(each.seconds for each in found)
    if not episodes:
        return {}
    model, tools = (sum(getattr(each, name) for each in found) for name in ("model_s", "tools_s"))
    branches: Counter[str] = sum((Counter(each.branches) for each in found), Counter())
    figures: dict[str, Any] = {
        "episodes": episodes,
        "turns": sum(each.turns for each in found) / episodes,
        "tool_calls": sum(each.tool_calls for each in found) / episodes,
        "model_share": model / max(seconds, 1e-9),
        "tools_share": tools / max(seconds, 1e-9),
        "waiting_share": max(0.0, seconds - model - tools) / max(seconds, 1e-9),
        "branches": branches.total() / episodes,
        "wasted_tokens": sum(each.wasted_tokens for each in found),
    }
    if branches:  # Parquet has no structure without fields
        figures["branches_by_cause"] = dict(sorted(branches.items()))
    return {"agents": figures}


# The tree.


class Line(NamedTuple):
    """Tokens from `start` to before `stop` that go on one from another, the first from `after`; -1: from nothing."""

    start: int
    stop: int
    after: int


class Path(NamedTuple):
    """Tokens in the order in which a call has seen them."""

    places: Places
    """Of them in the trajectory."""
    shared: int
    """So many of the first ones are also in paths before it."""


class Tree(NamedTuple):
    before: Places
    """The token that each goes on from; -1: from nothing."""
    paths: list[Path]


def lines(tokens: int, branches: Sequence[Branch]) -> list[Line]:
    starts = [0, *(branch.start for branch in branches), tokens]
    afters = [-1, *(branch.after for branch in branches)]
    return [Line(start, stop, after) for (start, stop), after in zip(pairwise(starts), afters, strict=True)]


def tree(tokens: int, branches: Sequence[Branch]) -> Tree:
    """With a path to every end."""
    whole = lines(tokens, branches)
    return Tree(_before(whole), _paths(whole))


def predicting_tree(sampled: npt.NDArray[np.bool_], branches: Sequence[Branch]) -> Tree:
    """With the paths that have to be computed to predict what was sampled: each ends with a token that one of the
    sampled tokens goes on from."""
    whole = lines(len(sampled), branches)
    starts = [line.start for line in whole]
    stops = list(starts)
    for index in reversed(range(len(whole))):  # what goes on from a line comes after it
        start, stop, after = whole[index]
        found = np.flatnonzero(sampled[start:stop])
        if len(found):
            stops[index] = max(stops[index], start + int(found[-1]))
        if after >= 0 and (stops[index] > start or sampled[start]):
            parent = bisect_right(starts, after) - 1
            stops[parent] = max(stops[parent], after + 1)
    return Tree(_before(whole), _paths([line._replace(stop=stop) for line, stop in zip(whole, stops, strict=True)]))


def _before(whole: Sequence[Line]) -> Places:
    found = np.arange(-1, whole[-1].stop - 1)
    for start, _, after in whole:
        found[start] = after
    return found


def _paths(parts: Sequence[Line]) -> list[Path]:
    """In the order of the lines that they end with, of which some may be empty here."""
    starts = [line.start for line in parts]
    seen = list(starts)
    """Up to where each line is in a path already."""
    continued = {line.after for line in parts if line.stop > line.start}
    found: list[Path] = []
    for index, (start, end, _) in enumerate(parts):
        if end == start or end - 1 in continued:
            continue
        pieces: list[Places] = []
        place, stop, own = index, end, 0
        while True:
            start, _, after = parts[place]
            pieces.append(np.arange(start, stop))
            own += max(0, stop - seen[place])
            seen[place] = max(stop, seen[place])
            if after < 0:
                break
            place, stop = bisect_right(starts, after) - 1, after + 1
        places = np.concatenate(pieces[::-1])
        found.append(Path(places, len(places) - own))
    return found
