"""The examples run as their first lines say."""

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.reader import read_run
from asyncrl.observe.query.tables import open_run
from asyncrl.types import GIVEN
from pipelines.recording.result import Result
from pipelines.replay import replay
from tests.support.judge_server import judge_server

EXAMPLES = Path(__file__).parents[2] / "examples"
JUDGES = Path(__file__).parents[2] / "docs" / "judges.md"
OWN = {
    "quick_pipeline": 25,
    "own_reward": 40,
    "own_environment": 40,
    "own_stage": 40,
    "own_parts": 40,
    "own_algorithm": 40,
    "own_curriculum": 60,
}
"""Lines that each may have; of the first those that are code."""


def run_example(name: str, *arguments: str | Path, monkeypatch: pytest.MonkeyPatch, where: Path) -> dict[str, Any]:
    """As `python examples/NAME.py ...` in an empty directory, in this process, which has imported torch already."""
    monkeypatch.chdir(where)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    summary = json.loads((where / "runs" / "pipeline-1" / "summary.json").read_text())
    assert summary["status"] == "ok"
    return summary


@pytest.mark.parametrize(("name", "lines"), OWN.items())
def test_examples_are_short(name: str, lines: int) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    if name == "quick_pipeline":
        body = ast.parse(source).body[1:]  # without the words at the top
        source = "\n".join(ast.unparse(node) for node in body)
        assert sum(bool(line.strip()) for line in source.splitlines()) <= lines
    assert len(source.splitlines()) <= max(lines, 40)


def test_quick_pipeline(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = run_example("quick_pipeline", model, monkeypatch=monkeypatch, where=tmp_path)
    assert (summary["steps"], summary["samples_trained"]) == (4, 64)


def test_own_reward(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"a{i}b+1=", "solution": f"a{i}b+1{i + 1}"} for i in range(9)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run_example("own_reward", model, "questions.jsonl", monkeypatch=monkeypatch, where=tmp_path)
    assert summary["reward_first"] > 0, "most answers stop in time"


def test_own_environment(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = run_example("own_environment", model, monkeypatch=monkeypatch, where=tmp_path)
    trajectories = list(read_run(tmp_path / "runs" / "pipeline-1" / "trajectories"))
    replies = [[s for s in t.segments[1:] if s.version == GIVEN] for t in trajectories]
    assert max(map(len, replies)) >= 2, "several turns were taken"
    assert all(t.segments[-1].version != GIVEN and len(t.tokens) <= 96 + 6 for t in trajectories)
    assert summary["ledger"]["consumed"] == 48
    calls = {round(-100 * t.reward) for t in trajectories if t.reward < 0}
    assert calls <= {1, 2, 3, 4, 5, 6, 7}, "a call costs one hundredth"
    assert calls


def test_own_stage(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = run_example("own_stage", model, monkeypatch=monkeypatch, where=tmp_path)
    trajectories = list(read_run(tmp_path / "runs" / "pipeline-1" / "trajectories"))
    assert all(t.finish == "stop" for t in trajectories)
    for trajectory in trajectories:
        assert trajectory.reward % 1 == pytest.approx(0.1 / trajectory.sampled_tokens)
    assert set(summary["ledger"]["dropped"]) <= {"stage:cut_off", "group_incomplete"}


def test_own_parts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example("own_parts", model, monkeypatch=monkeypatch, where=tmp_path)
    run = tmp_path / "runs" / "pipeline-1"
    trajectories = list(read_run(run / "trajectories"))
    assert all(list(t.parts) == ["right", "ended", "brief"] for t in trajectories)
    assert all(t.reward == sum(t.parts.values()) for t in trajectories)
    with open_run(run) as tables:
        by_step = "SELECT avg(parts['ended']) FROM trajectories WHERE step IS NOT NULL GROUP BY step ORDER BY step"
        found = [mean for (mean,) in tables.execute(by_step).fetchall()]
    assert Result(run).curves()["reward_parts.ended"].values == pytest.approx(found)
    assert replay(run, []).identical


def test_own_judge(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that docs/judges.md shows."""
    monkeypatch.setenv("JUDGE_KEY", "sk-of-the-example")
    with judge_server(lambda _: '{"steps": "yes", "clear": "3/5"}', key="sk-of-the-example") as server:
        summary = run_example("own_judge", model, server.url, "some-model", monkeypatch=monkeypatch, where=tmp_path)
    score = 0.5 * (1 * 1.0 + 0.5 * 3 / 5) / 1.5
    for trajectory in read_run(tmp_path / "runs" / "pipeline-1" / "trajectories"):
        assert trajectory.parts == {"function": trajectory.parts["function"], "judge_steps": 1.0, "judge_clear": 3.0}
        assert trajectory.reward == pytest.approx(trajectory.parts["function"] + score)
    assert summary["judge"]["calls"] == len(server.bodies) - 1 > 0, "all but the trial"
    assert {"temperature": 0, "max_tokens": 300, "model": "some-model"}.items() <= server.bodies[0].items()
    source = (EXAMPLES / "own_judge.py").read_text()
    shown = re.search(r"```python\n# examples/own_judge.py\n(.*?)```", JUDGES.read_text(), re.DOTALL)
    assert shown
    assert shown[1] in source
    assert len(source.splitlines()) <= 60


def test_own_curriculum(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run_example("own_curriculum", model, monkeypatch=monkeypatch, where=tmp_path)
    run = tmp_path / "runs" / "pipeline-1"
    with open_run(run) as tables:
        groups = "SELECT source, count(*), count(DISTINCT prompt_index) FROM groups GROUP BY ALL ORDER BY ALL"
        (_, additions, _), (_, chains, _) = found = tables.execute(groups).fetchall()
    assert [source for source, _, _ in found] == ["additions", "chains"]
    assert abs(chains - 3 * additions) <= 4
    assert any(different < all_of_them for _, all_of_them, different in found), "some were asked again"
    assert set(summary["evaluations"]["0"]["by_source"]) == {"additions", "chains"}
    assert "additions" in capsys.readouterr().out
    assert replay(run, []).identical


def test_own_algorithm(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = run_example("own_algorithm", model, monkeypatch=monkeypatch, where=tmp_path)
    assert summary["samples_trained"] == 48


def test_own_run(tmp_path: Path, model: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"a{i}b+1=", "answer": f"a{i}b+1{i + 1}"}) + "\n" for i in range(9))
    )
    command = [sys.executable, str(EXAMPLES / "own_run.py"), str(model), str(prompts), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("ok", 4, 64)
    assert summary["staleness_max"] <= 1


def test_own_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that reinforces begins with the weights that the supervised one ends with."""
    monkeypatch.chdir(tmp_path)
    own = runpy.run_path(str(EXAMPLES / "own_chats.py"))
    chats = own["made"](Path("own_chats.jsonl"), 40)
    model = own["start"](chats, steps=4)
    own["reinforce"](model, steps=1)
    trained = list(read_run(Path("runs/chats/trajectories")))
    assert len({t.prompt for t in trained}) > 30, "each chat comes once in an epoch"
    assert all(t.engine == "data" and sum(s.version != GIVEN for s in t.segments) == 2 for t in trained)
    assert (model / "tokenizer.json").is_file()
    summaries = [json.loads(Path("runs", name, "summary.json").read_text()) for name in ("chats", "reinforced")]
    assert [(each["status"], each["steps"]) for each in summaries] == [("ok", 4), ("ok", 1)]
