"""`asyncrl query`: what it prints, and what it says when a question cannot be answered."""

import csv
import io
import json
from pathlib import Path

import pytest

from asyncrl.observe.query.queries import READY
from asyncrl.observe.query.tables import TABLES
from pipelines.cli import main
from pipelines.cli.query import draw, query
from tests.support.recorded_runs import answer, empty_run, small_run, write_log

SQL = "SELECT group_id, reward, finish FROM trajectories WHERE step = 0 ORDER BY group_id, sample"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_run(tmp_path / "run")


def test_csv_and_json_have_every_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query(run, SQL, "csv")
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[:2] == [["group_id", "reward", "finish"], ["0", "1.0", "stop"]]
    assert len(rows) == 5
    query(run, SQL, "json")
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[3]) == {"group_id": 1, "reward": 0.5, "finish": "length"}
    query(run, "SELECT by_size, tokens FROM evaluations, trajectories LIMIT 1", "json")
    assert json.loads(capsys.readouterr().out)["tokens"] == [1, 2, 3, 10, 11]


def test_a_ready_query_and_a_table_go_by_their_names(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query(run, "groups_without_signal", "csv")
    assert capsys.readouterr().out.splitlines() == ["step,groups,without_signal,share", "0,2,1,0.5", "1,1,0,0.0"]
    query(run, "evaluations", "csv")
    assert capsys.readouterr().out.startswith("step,time,seconds,sampled")


def test_without_a_question_it_says_what_can_be_asked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query(run, None)
    said = capsys.readouterr().out
    assert all(f"{name}: " in said for name in TABLES)
    assert all(f"{name} " in said for name in READY)
    assert "answer_tokens BIGINT" in said


def test_a_table_shows_what_a_terminal_would_obey(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = empty_run(tmp_path / "run")
    write_log(directory.trajectories, [answer(0, 0, 1.0, [0], prompt="[red]\x1b[2J" + "x" * 100)])
    query(directory.path, "SELECT prompt, tokens FROM trajectories")
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "[red]\N{REPLACEMENT CHARACTER}[2Jx" in said
    assert "x..." in said


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELECT rewrd FROM trajectories", '"rewrd" not found'),
        ("SELECT 1 FROM trajectory", "Table with name trajectory does not exist"),
        ("SELEC 1", "syntax error"),
        ("SELECT 1 / 'a'", "Could not convert"),
        ("COPY metrics TO 'x.csv'", "file system operations are disabled"),
    ],
)
def test_wrong_sql_is_answered_in_a_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], sql: str, says: str
) -> None:
    assert main(["query", str(run), sql]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "trajectories, groups, metrics, events, evaluations, episodes, turns" in said
    assert said.count("\n") == 1


def test_a_name_that_is_nearly_right(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["query", str(run), "longest_answer"]) == 2
    assert "did you mean longest_answers?" in capsys.readouterr().err


def test_a_table_is_as_wide_as_its_cells(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query(run, "SELECT step, reward AS belohnung FROM metrics")
    assert capsys.readouterr().out.splitlines() == [
        "┏━━━━━━┳━━━━━━━━━━━┓",
        "┃ step ┃ belohnung ┃",
        "┡━━━━━━╇━━━━━━━━━━━┩",
        "│ 0    │ 0.5       │",
        "└──────┴───────────┘",
    ]


def test_what_does_not_fit_is_folded() -> None:
    lines = list(draw(["n", "prompt"], [["1", "a long name of it"], ["2", "漢字é"]], 20))
    assert lines[3:6] == ["│ 1 │ a long name  │", "│   │ of it        │", "│ 2 │ 漢字é        │"]
    assert list(draw(["a"], [], 3)) == ["┏━━━┓", "┃ a ┃", "┡━━━┩", "└───┘"]


def test_a_table_says_when_it_does_not_show_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sql, more in (("SELECT * FROM range(1000)", False), ("SELECT * FROM range(1001)", True)):
        query(run, sql)
        said = capsys.readouterr().out
        assert said.count("│") == 2 * 1000
        assert ("--format csv or json has all" in said) == more
