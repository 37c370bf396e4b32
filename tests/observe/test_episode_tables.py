"""The tables `episodes` and `turns`, beside rows of other kinds in one log."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.observe.query.queries import READY
from asyncrl.observe.query.tables import open_run
from asyncrl.types import Branch, Episode, Segment, Slot, Trajectory, Turn
from tests.support.episodes import random_episode
from tests.support.recorded_runs import answer, empty_run, small_run, write_log


def ask(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with open_run(path) as run:
        return run.execute(sql).fetchall()


def played() -> Trajectory:
    """Two turns in a line, then one after the prompt once more, in which the reasoning was stripped."""
    sampled = [Segment.sampled([10, 11], [-0.5, -0.25], 0), Segment.sampled([12], [-0.5], 1)]
    segments = (Segment.given([1, 2, 3]), sampled[0], Segment.given([4]), sampled[1], Segment.given([5, 6]))
    episode = Episode(
        branches=(Branch(7, 2, "reasoning_stripped"), Branch(11, -1, "new_conversation")),
        turns=(Turn(3, 5, 0.5, 2), Turn(6, 7, 0.0, 0), Turn(9, 11, -1.0, 1)),
        model_s=2.0,
        tools_s=1.5,
        wasted_tokens=4,
    )
    last = (Segment.sampled([13, 14], [-1.0, -1.0], 1), Segment.given([7]))
    return answer(4, 1, 0.75, [0], segments=(*segments, *last), episode=episode, started=10.0, finished=14.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = empty_run(tmp_path / "run")
    parted = answer(0, 1, 1.0, [0], parts={"format": 0.5})
    both = msgspec.structs.replace(played(), slot=Slot(5, 0), parts={"format": 0.25})
    write_log(directory.trajectories, [answer(0, 0, 1.0, [0]), parted, played(), both, answer(6, 0, 0.0, [1])])
    return directory.path


def test_an_episode_is_a_row(run: Path) -> None:
    sql = """
        SELECT turns, tool_calls, seconds, model_seconds, tools_seconds, waiting_seconds, branches, branches_by_cause,
            sampled_tokens, given_tokens, wasted_tokens, turn_rewards, reward
        FROM episodes WHERE group_id = 4
    """
    causes = {"new_conversation": 1, "reasoning_stripped": 1}
    assert ask(run, sql) == [(3, 3, 4.0, 2.0, 1.5, 0.5, 2, causes, 5, 7, 4, -0.5, 0.75)]
    assert ask(run, "SELECT group_id, sample FROM episodes ORDER BY ALL") == [(4, 1), (5, 0)]


def test_a_turn_is_a_row_and_knows_the_branch_by_which_its_call_came(run: Path) -> None:
    found = ask(run, "SELECT turn, start, stop, tokens, reward, tool_calls, branch FROM turns WHERE group_id = 5")
    assert found == [
        (0, 3, 5, 2, 0.5, 2, None),
        (1, 6, 7, 1, 0.0, 0, None),
        (2, 9, 11, 2, -1.0, 1, "reasoning_stripped"),
    ]


def test_other_rows_are_as_they_were(run: Path) -> None:
    assert ask(run, "SELECT group_id, parts, route_bytes FROM trajectories ORDER BY group_id, sample") == [
        (0, None, None),
        (0, {"format": 0.5}, None),
        (4, None, None),
        (5, {"format": 0.25}, None),
        (6, None, None),
    ]


def test_ready_queries_about_episodes(run: Path) -> None:
    assert ask(run, READY["branches_by_cause"].sql) == [
        ("new_conversation", 2, 2, 1.0),
        ("reasoning_stripped", 2, 2, 1.0),
    ]
    assert ask(run, READY["reward_by_turns"].sql) == [(3, 2, 0.75, 3.0, 5.0, 4.0)]
    assert ask(run, READY["episodes_by_step"].sql) == []


def test_a_run_without_a_harness_has_none(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    assert ask(path, "FROM episodes") == ask(path, "FROM turns") == ask(path, READY["branches_by_cause"].sql) == []


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1))
def test_tables_hold_what_the_episodes_say(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    played = [random_episode(rng, Slot(group, 0), turn_rewards=True) for group in range(3)]
    directory = empty_run(tmp_path / f"run-{rng.integers(2**62)}")
    write_log(directory.trajectories, played)
    episodes = [t.episode for t in played if t.episode]
    found = ask(directory.path, "SELECT turns, branches, tool_calls, wasted_tokens FROM episodes ORDER BY group_id")
    assert found == [
        (len(e.turns), len(e.branches), sum(turn.tool_calls for turn in e.turns), e.wasted_tokens) for e in episodes
    ]
    found = ask(directory.path, "SELECT start, stop, reward, tool_calls FROM turns ORDER BY group_id, turn")
    assert found == [(t.start, t.stop, t.reward, t.tool_calls) for e in episodes for t in e.turns]
