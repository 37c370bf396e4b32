"""What a report holds, of runs that ended well or badly, or have not ended."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.drop_reasons import describe
from asyncrl.errors import ConfigError
from asyncrl.observe.report.document import SCRIPTS
from asyncrl.observe.report.samples import zip_round
from asyncrl.system.run_directory import RunDirectory, replace
from pipelines.recording.report import write_report
from tests.support.synthetic_runs import CASES, Scenario, write_run

PAGE = Path(__file__).parents[2] / "asyncrl" / "observe" / "report" / "page"


def data(report: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', report.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("stale"), CASES["stale"])


def test_every_sampled_token_is_accounted_for(stale: Path) -> None:
    waste = data(write_report(stale))["waste"]
    summary = json.loads((stale / "summary.json").read_text())
    tokens = {row["label"]: row["tokens"] for row in waste["rows"]}
    assert tokens["dropped: too old"] == summary["waste"]["stale"] > 0
    completions = {row["label"]: row["completions"] for row in waste["rows"]}
    assert completions["trained on"] == summary["samples_trained"]
    assert sum(row["share"] for row in waste["rows"]) == pytest.approx(1)
    assert waste["useful"] == pytest.approx(tokens["trained on"] / (tokens["trained on"] + tokens["dropped: too old"]))
    meanings = {row["label"]: row["meaning"] for row in waste["rows"]}
    assert meanings["dropped: too old"] == describe("stale").meaning
    assert meanings["trained on"] == ""
    assert ["stale", *describe("stale")[1:]] in waste["reasons"]


def test_the_timeline_has_everybody(stale: Path) -> None:
    timeline = data(write_report(stale))["timeline"]
    assert [engine["name"] for engine in timeline["engines"]] == ["rollout-0", "rollout-1"]
    assert timeline["versions"]["version"] == list(range(1, 13))
    assert len(timeline["steps"]) == 12
    assert {timeline["kinds"][kind] for kind in timeline["trainer"]["kind"]} >= {"training", "generation", "evaluation"}
    assert any(fate.startswith("dropped: stale") for fate in timeline["completions"]["fate"])


def test_samples_of_every_kind_with_their_text(stale: Path) -> None:
    found = data(write_report(stale))["samples"]
    kinds = {kind["name"]: kind["samples"] for kind in found["kinds"]}
    assert set(kinds) >= {"newest", "best", "worst", "longest", "dropped"}
    best, worst = (found["samples"][kinds[name][0]] for name in ("best", "worst"))
    assert best["reward"] == 1 > worst["reward"] == 0
    assert best["prompt"] == f"What is {best['group']}?"
    assert len(best["pieces"]) == len(best["logprobs"]) == best["tokens"]
    assert "dropped: stale" in found["samples"][kinds["dropped"][0]]["fate"]


def test_a_crashed_run_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path, Scenario(steps=2, status="failed", error="ActorError: the trainer died"))
    found = data(write_report(run))["run"]
    assert (found["status"], found["tone"]) == ("failed", "bad")
    assert found["trouble"] == "ActorError: the trainer died"
    replace(run / "stall.txt", b"the reward function has not answered for 600 s\n\nwho waits for whom\n  1. ...\n")
    assert data(write_report(run))["run"]["trouble"] == "the reward function has not answered for 600 s"


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path: Path) -> None:
    run = write_run(tmp_path, Scenario(steps=3))
    (run / "summary.json").unlink()
    assert data(write_report(run))["run"]["status"] == "killed"
    (run / "actors.json").write_text(json.dumps({"driver": os.getpid()}))
    found = data(write_report(run))
    assert found["run"]["status"] == "still going on"
    assert found["headline"]["bound"] == "generation"


@pytest.mark.parametrize("missing", ["events.jsonl", "metrics.parquet", "trajectories", "model", "all"])
def test_missing_files_leave_the_rest(missing: str, stale: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stale, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(stale), str(run)))  # where the model is
    for path in run.iterdir():
        if path.name != "config.yaml" and missing in (path.name, "all"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = data(write_report(run))
    assert (found["timeline"] is None) == (missing in ("events.jsonl", "all"))
    assert (found["learning"] == []) == (missing in ("metrics.parquet", "all"))
    assert (found["samples"] is None) == (missing in ("trajectories", "all"))
    if missing == "model":
        assert re.fullmatch(r"(\[\d+\])+", found["samples"]["samples"][0]["prompt"])


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    replace(directory.config, b"name: run\nsteps: 5\n")
    found = data(write_report(directory.path))
    assert found["headline"]["bound"] == "nothing"
    assert found["run"]["when"].endswith("0 of 5 steps")


def test_no_run_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config\.yaml"):
        write_report(tmp_path)


def test_the_report_goes_where_it_is_told(stale: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    assert write_report(stale, out) == out
    assert out.stat().st_mode & 0o077 == 0  # answers are nobody else's business


def test_nothing_is_fetched_and_no_tag_can_begin_in_the_data(tmp_path: Path) -> None:
    report = write_report(
        write_run(tmp_path, Scenario(steps=1, text="</script><script>alert(1)</script><!--"))
    ).read_text()
    inside = report.partition('id="data">')[2].partition("</script>")[0]
    assert "<" not in inside
    assert "alert(1)" in inside
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", report) == []


def test_scripts_are_short_and_build_no_markup() -> None:
    for name in SCRIPTS:
        text = (PAGE / name).read_text()
        assert len(text.splitlines()) <= 300
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)


def test_what_does_not_fit_is_missing_from_all_kinds_alike() -> None:
    assert zip_round([[1, 2, 3], [4], [5, 6]]) == [[1, 4, 5], [2, 6], [3]]
    assert zip_round([]) == []
