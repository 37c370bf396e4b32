"""A run's tables: every value where it belongs, at any moment of the run, and nothing else in reach."""

import hashlib
import re
import struct
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.data.arrow import encode
from asyncrl.data.reward_parts import to_text
from asyncrl.drop_reasons import describe
from asyncrl.errors import ConfigError, CorruptSegmentError
from asyncrl.observe.query import logs
from asyncrl.observe.query.queries import READY
from asyncrl.observe.query.tables import METRICS, TABLES, open_run, read_buffer
from asyncrl.types import Segment, Slot, Trajectory
from tests.support.recorded_runs import answer, empty_run, small_run, write_log

DOCS = Path(__file__).parents[2] / "docs" / "query.md"
ANY_FILE = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ask(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with open_run(path) as run:
        return run.execute(sql).fetchall()


def stored(directory: Path) -> list[dict[str, Any]]:
    return read_buffer(directory)[0].to_pylist()


def test_what_became_of_each_answer(tmp_path: Path) -> None:
    rows = ask(
        small_run(tmp_path / "run"),
        "SELECT group_id, sample, fate, step, staleness, drop_reason FROM trajectories ORDER BY ALL",
    )
    assert rows == [
        (0, 0, "trained", 0, 0, None),
        (0, 1, "trained", 0, 0, None),
        (1, 0, "trained", 0, 0, None),
        (1, 1, "trained", 0, 0, None),
        (2, 0, "dropped", None, None, "group_incomplete"),
        (3, 0, "training", 1, 1, None),
        (3, 1, "training", 1, 1, None),
        (4, 0, "buffered", None, None, None),
    ]


def test_lengths_versions_and_tokens(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    sql = "SELECT prompt_tokens, answer_tokens, oldest_version, newest_version, seconds FROM trajectories"
    assert ask(path, f"{sql} WHERE group_id = 3 AND sample = 1") == [(3, 6, 0, 1, 3.0)]
    assert ask(path, "FROM tokens(3, 0)") == [
        (0, 1, -1, 0.0),
        (1, 2, -1, 0.0),
        (2, 3, -1, 0.0),
        (3, 10, 0, -0.5),
        (4, 11, 0, -0.25),
        (5, 10, 1, -0.5),
        (6, 11, 1, -0.25),
    ]


def test_groups_metrics_events_and_evaluations(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    assert ask(path, "SELECT group_id, size, version, step, take, drop_reason, drop_sample FROM groups") == [
        (0, 2, 0, 0, 0, None, None),
        (1, 2, 0, 0, 1, None, None),
        (2, 2, 0, None, None, "reward_error", 1),
        (3, 2, 0, 1, 0, None, None),
        (4, 2, 1, None, None, None, None),
    ]
    assert ask(path, "SELECT step, reward, loss, ess FROM metrics") == [(0, 0.5, None, 0.9)]
    assert ask(path, "SELECT time, seconds, text, fields->>'$.figure' FROM events WHERE kind = 'alarm'") == [
        (104.0, None, "ess=0.1 is low", "ess")
    ]
    assert ask(path, "SELECT step, sampled, greedy, reward FROM evaluations") == [(1, 0.5, 0.75, None)]


def test_a_torn_event_is_left_out(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    whole = ask(path, "SELECT count(*) FROM events")
    with (path / "events.jsonl").open("ab") as file:
        file.write('{"kind": "alarm", "text": "\u00fc'.encode()[:-1])
    assert ask(path, "SELECT count(*) FROM events") == whole


def test_ready_queries_by_hand(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    assert ask(path, READY["reward_by_step"].sql) == [(0, 4, 0.5, 0.0, 1.0), (1, 2, 0.5, 0.0, 1.0)]
    assert ask(path, READY["groups_without_signal"].sql) == [(0, 2, 1, 0.5), (1, 1, 0, 0.0)]
    assert ask(path, READY["drops_by_reason"].sql) == [("group_incomplete", 1, 1, 4), ("reward_error", 1, 0, 0)]
    assert ask(path, READY["drop_meanings"].sql) == [("reward_error", 1, *describe("reward_error")[1:])]
    assert ask(path, READY["longest_answers"].sql)[0][:4] == (3, 1, "made/3", 6)
    assert ask(path, READY["stalest_samples"].sql)[0][:5] == (3, 1, "made/3", 1, 1)
    assert ask(path, READY["truncated_by_step"].sql)[0] == (0, 4, 0.25, 0.5, 0.5)
    assert ask(path, READY["waits_by_cause"].sql)[0] == ("wait_batch", 1, 1.5, 1.5, 1.5, 0.375)
    assert ask(path, READY["reward_by_prompt"].sql)[0] == ("made/2", 1, 0.25, 0.0, None)
    assert sum(row[1] for row in ask(path, READY["throughput_over_time"].sql)) == 8
    assert ask(path, READY["time_per_engine"].sql) == [
        ("rollout-0", 5, 1.4, 2.0, 2.0, 1.4),
        ("rollout-1", 3, 1.667, 2.8, 3.0, 1.3),
    ]


def test_parts_of_rewards(tmp_path: Path) -> None:
    """In one log with answers that have none, as those before a resumption by a release that knows parts."""
    path = small_run(tmp_path / "run", parts={(0, 1): {"right": 1.0, "format": 0.5}, (3, 0): {"format": -1.0}})
    assert ask(path, "SELECT sample, parts, parts['format'] FROM trajectories WHERE group_id = 0") == [
        (0, None, None),
        (1, {"right": 1.0, "format": 0.5}, 0.5),
    ]
    assert ask(path, READY["reward_parts_by_step"].sql) == [
        (0, "format", 1, 0.5, 0.5, 0.5),
        (0, "right", 1, 1.0, 1.0, 1.0),
        (1, "format", 1, -1.0, -1.0, -1.0),
    ]


@pytest.mark.parametrize("name", READY)
def test_ready_queries_have_an_answer_before_the_first_step(tmp_path: Path, name: str) -> None:
    assert ask(empty_run(tmp_path / "run").path, READY[name].sql) == []


def test_the_documented_columns_are_the_real_ones(tmp_path: Path) -> None:
    sections = dict(re.findall(r"^## (\w+)$(.*?)(?=^## |\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL))
    with open_run(empty_run(tmp_path / "run").path) as run:
        for name in TABLES:
            documented = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", sections[name], re.MULTILINE)
            assert documented == [column[:2] for column in run.execute(f"DESCRIBE {name}").fetchall()], name
    assert list(METRICS) == [name for name, _ in re.findall(r"^\| `(\w+)` \| (\w+)", sections["metrics"], re.MULTILINE)]


def test_the_documented_queries_are_the_real_ones() -> None:
    section = DOCS.read_text().partition("## Ready-made queries")[2].partition("\n## ")[0]
    without_links = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", section)
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", without_links, re.MULTILINE)) == {
        name: ready.says for name, ready in READY.items()
    }
    assert len(READY) == 17


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "COPY trajectories TO 'out.csv'",
        "ATTACH 'other.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SELECT * FROM sql_of_a_python_variable",
    ],
)
def test_sql_reaches_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = small_run(tmp_path / "run")
    sql_of_a_python_variable = [1, 2]
    with open_run(path) as run, pytest.raises(duckdb.Error):
        run.execute(sql).fetchall()
    assert sql_of_a_python_variable
    assert [found.name for found in tmp_path.iterdir()] == ["run"]


def test_a_query_changes_no_file(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")

    def files() -> dict[str, tuple[str, int]]:
        found = (file for file in path.rglob("*") if file.is_file())
        return {str(file): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns) for file in found}

    before = files()
    ask(path, "SELECT sum(len(tokens)) FROM trajectories")
    assert files() == before


def test_long_columns_are_read_by_those_who_name_them(tmp_path: Path) -> None:
    with open_run(small_run(tmp_path / "run")) as run:
        plans = {
            sql: str(run.execute(f"EXPLAIN {sql}").fetchall())
            for sql in ("SELECT avg(reward) FROM trajectories", "SELECT sum(answer_tokens) FROM trajectories")
        }
    assert ["versions" in plan for plan in plans.values()] == [False, True]
    assert not any("logprobs" in plan for plan in plans.values())


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        open_run(tmp_path)


segments = st.lists(st.tuples(st.booleans(), st.integers(1, 70), st.integers(0, 2000)), min_size=1, max_size=4)
texts = st.text(max_size=40).filter(lambda text: "\0" not in text)


rewards = st.tuples(st.floats(-9, 9), st.dictionaries(st.sampled_from("abcd"), st.floats(-9, 9)))


likeliest = st.sampled_from([None, 0, 1, 4])
"""How many tokens a teacher has named; None: it was not asked."""


@given(
    rows=st.lists(st.tuples(segments, texts, texts, rewards, likeliest), min_size=1, max_size=12), seal=st.booleans()
)
@ANY_FILE
def test_any_trajectory_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], seal: bool
) -> None:
    made = [
        Trajectory(
            slot=Slot(group, group % 3),
            prompt=prompt,
            engine=engine,
            segments=tuple(
                Segment.given([7] * length) if given else Segment.sampled([9] * length, [-0.5] * length, version)
                for given, length, version in parts
            ),
            reward=reward,
            parts=named,
            finish="stop",
            started=1.5,
            finished=2.5,
        )
        for group, (parts, prompt, engine, (reward, named), _) in enumerate(rows)
    ]
    for index, (*_, count) in enumerate(rows):
        if count is not None:  # zeros are ids and log-probabilities
            tokens = made[index].sampled_tokens
            top_k = bytes(4 * (2 * count + 1) * tokens) if count else b""
            made[index] = msgspec.structs.replace(
                made[index], teacher_logprob_bytes=bytes(4 * tokens), teacher_top_k_bytes=top_k
            )
    directory = tmp_path_factory.mktemp("log")
    write_log(directory, made, seal=seal)
    for row, trajectory in zip(stored(directory), made, strict=True):
        assert (row["group_id"], row["sample"]) == (trajectory.slot.group, trajectory.slot.sample)
        assert (row["prompt"], row["engine"], row["precision"]) == (trajectory.prompt, trajectory.engine, "fp32")
        assert (row["reward"], row["started"], row["finished"]) == (trajectory.reward, 1.5, 2.5)
        assert row["parts"] == (to_text(trajectory.parts) if trajectory.parts else "")
        assert row["tokens"] == trajectory.tokens.tolist()
        assert row["logprobs"] == trajectory.logprobs.tolist()
        assert row["versions"] == trajectory.versions.tolist()
        assert row["teacher_logprobs"] == trajectory.teacher_logprobs.tolist()
        assert row["teacher_top_k_bytes"] == len(trajectory.teacher_top_k_bytes)


def test_an_unfinished_write_is_left_out_wherever_it_ends(tmp_path: Path) -> None:
    write_log(tmp_path, [answer(group, 0, 1.0, [0]) for group in range(3)], seal=False)
    (path,) = tmp_path.glob("*.open")
    whole = path.read_bytes()
    last = len(encode(answer(2, 0, 1.0, [0]))) + 32
    for cut in range(1, last + 1, 7):
        path.write_bytes(whole[:-cut])
        assert [row["group_id"] for row in stored(tmp_path)] == [0, 1]
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [row["group_id"] for row in stored(tmp_path)] == [0, 1]
    path.write_bytes(whole[:40])
    assert stored(tmp_path) == []


def test_what_looks_like_a_beginning_does_not_lead_astray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that are, as bytes, how each payload begins: -1, the length of Arrow's metadata and so on."""
    given, *versions = struct.unpack("<4i", encode(answer(0, 0, 1.0, [0]))[: logs.MARK_BYTES])
    assert given == -1
    looks = (Segment.given([1]), *(Segment.sampled([2], [-1.0], version) for version in versions))
    made = [answer(group, 0, 1.0, [0], segments=40 * looks) for group in range(30)]
    write_log(tmp_path, made)
    for stride in (256, 1000, 3000, 1 << 17):
        monkeypatch.setattr(logs, "STRIDE", stride)
        assert [row["group_id"] for row in stored(tmp_path)] == list(range(30))


@given(place=st.integers(0), value=st.integers(1, 255))
@ANY_FILE
def test_a_damaged_file_is_refused_or_read_within_its_bounds(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int
) -> None:
    directory = tmp_path_factory.mktemp("log")
    parts = ({}, {"format": 0.5}, {})
    write_log(directory, [answer(i, 0, 1.0, [0], prompt="a long name of a prompt", parts=parts[i]) for i in range(3)])
    (path,) = directory.glob("*.seg")
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= value
    path.write_bytes(data)
    try:
        rows = stored(directory)
    except CorruptSegmentError as error:
        assert "asyncrl check" in str(error)  # noqa: PT017
    else:
        assert all(sum(len(row[name]) for name in ("tokens", "logprobs", "versions")) < len(data) for row in rows)


@pytest.mark.parametrize("prompt", ["short", "of thirty letters and no more !", "long" * 100])
def test_what_is_no_text_is_refused(tmp_path: Path, prompt: str) -> None:
    write_log(tmp_path, [answer(0, 0, 1.0, [0], prompt=prompt), answer(1, 0, 1.0, [0], prompt="\u00fc" * 100)])
    (path,) = tmp_path.glob("*.seg")
    whole = path.read_bytes()
    assert [row["prompt"] for row in stored(tmp_path)] == [prompt, "\u00fc" * 100]
    path.write_bytes(whole.replace(prompt.encode(), prompt[:-1].encode() + b"\xff"))
    with pytest.raises(CorruptSegmentError, match="asyncrl check"):
        stored(tmp_path)
