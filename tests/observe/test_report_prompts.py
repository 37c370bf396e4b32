"""The report's section about prompts, and the queries it stands on."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import load
from asyncrl.observe.query.queries import READY
from asyncrl.observe.query.tables import open_run
from asyncrl.observe.report import curves
from asyncrl.observe.report.prompts import prompts
from asyncrl.observe.report.recorded import read
from asyncrl.system.run_directory import replace
from pipelines.compose import to_yaml
from tests.support.recorded_runs import empty_run, small_run
from tests.support.synthetic_runs import Scenario, write_run

CHAINS = {"type": "chains"}
MIX = {"type": "mix", "sources": {"easy": {"weight": 3, "task": CHAINS}, "hard": {"task": CHAINS}}}


def titles(charts: list[dict[str, Any]]) -> list[str]:
    return [chart["title"] for chart in charts]


def test_a_run_of_one_source(tmp_path: Path) -> None:
    found = prompts(read(write_run(tmp_path, Scenario(steps=3))))
    assert found is not None
    assert titles(found["charts"]) == ["Prompts", "Success rates"]
    asked, rates = found["charts"]
    assert [line["y"] for line in asked["series"]] == [[4, 8, 12]] * 2, "every prompt was another one"
    assert [sum(line["y"][step] for line in rates["series"]) for step in range(3)] == pytest.approx([1] * 3)
    assert found["rows"][0][:4] == ["all", "12", "12", "0%"]
    assert prompts(read(empty_run(tmp_path / "empty").path)) is None


def test_by_source_and_in_the_band(tmp_path: Path) -> None:
    run = write_run(tmp_path, Scenario(steps=5, groups=8))
    raw = {"name": "run", "task": MIX, "curriculum": {"band": [0.2, 0.6]}}
    replace(run / "config.yaml", to_yaml(load(raw)).encode())
    recorded = read(run)
    found = prompts(recorded)
    assert found is not None
    assert titles(found["charts"]) == ["Prompts", "Success rates", "In the band", "Reward by source"]
    assert [row[:3] for row in found["rows"]] == [["easy", "30", "30"], ["hard", "10", "10"]]
    assert found["head"][-1] == "in [0.2, 0.6]"
    groups = recorded.connection.execute(
        "SELECT group_id, source, g.step, avg(reward) FROM trajectories JOIN groups g USING (group_id) GROUP BY ALL"
    ).fetchall()
    assert {source for group, source, _, _ in groups if group % 4 == 0} != {None}
    last = [0.2 <= rate <= 0.6 for _, source, step, rate in groups if source == "easy" and step == 4]
    assert found["charts"][2]["series"][0]["y"][-1] == pytest.approx(sum(last) / len(last), rel=1e-4)


def test_the_ready_query(tmp_path: Path) -> None:
    with open_run(small_run(tmp_path / "run")) as run:
        (row,) = run.execute(READY["prompts_by_source"].sql).fetchall()
    assert row[:3] == ("all", 5, 5)


def test_scores_by_source_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path, Scenario(steps=2))
    assert "Held-out by source" not in titles(curves.learning(read(run)))
    text = (run / "events.jsonl").read_text().replace('"by_source":{}', '"by_source":{"easy":0.75,"hard":0.25}')
    (run / "events.jsonl").write_text(text)
    chart = next(each for each in curves.learning(read(run)) if each["title"] == "Held-out by source")
    assert [(line["name"], line["y"]) for line in chart["series"]] == [("easy", [0.75] * 2), ("hard", [0.25] * 2)]
