"""Whole runs with a judge: nothing is lost, nothing is asked twice, the key is nowhere, the cost is in the report."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.buffer.reader import read_run
from asyncrl.drop_reasons import DropReason
from asyncrl.judges.judge import verdict_key
from asyncrl.types import Trajectory
from pipelines.compose import from_yaml
from tests.support import quickstart_runs
from tests.support.command import Done, asyncrl
from tests.support.judge_server import GOOD, Faults, JudgeServer, judge_server

KEY = "sk-a-key-that-nobody-may-see"
FAULTS = Faults(error=0.1, silence=0.1, limited=0.05, malformed=0.05)
SMALL = (
    *quickstart_runs.SMALL,
    "name=run",
    "rollout.max_tokens=24",
    "reward.judge.model=m",
    "reward.judge.rubric={correct: 'Is it right?', clear: {ask: 'Is it clear?', points: 5}}",
    "reward.judge.backoff_s=0.02",
)


def words(server: JudgeServer, root: Path, model: Path, *more: str) -> list[str]:
    return [*SMALL, f"model.path={model}", f"root={root}", f"reward.judge.url={server.url}", *more]


def trained(directory: Path) -> list[Trajectory]:
    return list(read_run(directory / "trajectories"))


def summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def checked(directory: Path) -> str:
    done = asyncrl("check", directory)
    assert done.code == 0, done.out
    return done.out


def failed(done: Done, code: int) -> str:
    assert done.code == code, done.out + done.err
    assert "Traceback" not in done.err
    return done.err


def test_faults_lose_nothing(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    limits = ("reward.judge.api_key_env=JUDGE_KEY", "reward.judge.timeout_s=0.5", "reward.judge.retries=2")
    with judge_server(faults=FAULTS, key=KEY) as server:
        done = asyncrl("run", *words(server, tmp_path, model, *limits))
    assert done.code == 0, done.out + done.err
    directory = tmp_path / "run"
    assert "verdict     sound" in checked(directory)
    found = summary(directory)
    ledger, cost = found["ledger"], found["judge"]
    assert ledger["leased"] == ledger["consumed"] + ledger["in_flight"] + ledger["buffered"] + sum(
        ledger["dropped"].values()
    )
    judged = trained(directory)
    assert len(judged) >= ledger["consumed"] == 64
    for sample in judged:
        assert sample.parts.keys() == {"function", "judge_correct", "judge_clear"}
        assert sample.reward == pytest.approx(sample.parts["function"] + 0.9)
    # Whatever has no verdict is counted under its reason, and what it takes along as such.
    assert set(ledger["dropped"]) <= {
        DropReason.JUDGE_ERROR, DropReason.JUDGE_TIMEOUT, DropReason.JUDGE_INVALID, DropReason.GROUP_INCOMPLETE,
    }  # fmt: skip
    assert cost["retries"] + cost["rate_limited"] > 0 < server.calls["silence"]
    assert cost["verdicts"] + cost["cache_hits"] + cost["failures"] >= 64
    assert not [path for path in directory.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert KEY not in done.out + done.err
    told = asyncrl("report", directory)
    assert told.code == 0, told.err
    page = (directory / "report.html").read_text()
    assert KEY not in page
    assert f"{cost['calls']:,} calls" in page
    assert "judge_clear" in page


def test_a_judge_in_place_of_a_function(tmp_path: Path, model: Path) -> None:
    def answer(text: str) -> str:
        return GOOD if len(text) % 2 else "correct: no\nclear: 0"

    with judge_server(answer) as server:
        done = asyncrl("run", *words(server, tmp_path, model, "reward.function=", "reward.judge.weight=2"))
    assert done.code == 0, done.out + done.err
    seen = Counter(round(sample.reward, 6) for sample in trained(tmp_path / "run"))
    assert seen.keys() == {0.0, 1.8}
    assert all(sample.parts.keys() == {"judge_correct", "judge_clear"} for sample in trained(tmp_path / "run"))
    assert f"the judge {server.url} (m) on " in done.out


def test_a_run_that_was_killed_asks_nothing_twice(tmp_path: Path, model: Path) -> None:
    with judge_server() as server:
        more = words(server, tmp_path, model, "steps=6")[len(quickstart_runs.SMALL) :]
        process = quickstart_runs.start(tmp_path, model, *more)
        quickstart_runs.kill_after_step(process, tmp_path, 2)
        directory, before = tmp_path / "run", len(server.bodies)
        with closing(sqlite3.connect(directory / "judge.sqlite")) as store:
            known = {key for (key,) in store.execute("SELECT key FROM verdicts")}
            calls = json.loads(store.execute("SELECT counters FROM cost").fetchone()[0])["calls"]
        assert 0 < len(known) <= calls <= before
        done = asyncrl("resume", directory)
        assert done.code == 0, done.out + done.err
        settings = from_yaml(directory / "config.yaml").reward.judge
        assert not known & {verdict_key(body, settings) for body in server.bodies[before:]}
    checked(directory)
    assert summary(directory)["judge"]["calls"] == calls + len(server.bodies) - before


def test_a_judge_that_fails_always_ends_the_run_with_its_reason(tmp_path: Path, model: Path) -> None:
    def answer(_: str) -> str:  # to the trial; nobody is answered after it
        server.status = 500
        return GOOD

    with judge_server(answer) as server:
        said = failed(asyncrl("run", *words(server, tmp_path, model, "evaluation.prompts=32", "steps=100000")), 12)
    assert f"reward.judge.url={server.url}: answered 500 Internal Server Error" in said
    assert "it has failed on every call so far" in said
    assert f"asyncrl resume {tmp_path / 'run'}" in said


def test_a_judge_that_refuses_us_is_told_before_anything_starts(tmp_path: Path, model: Path) -> None:
    with judge_server(key=KEY) as server:
        said = failed(asyncrl("run", *words(server, tmp_path, model)), 2)
        assert f"reward.judge.url={server.url}: answered 401 Unauthorized" in said
        assert not (tmp_path / "run").exists()
        named = "reward.judge.template='{completion} {nothing}'", "reward.judge.api_key_env=NOT_SET"
        said = failed(asyncrl("plan", *words(server, tmp_path, model, *named)), 2)
    assert "{nothing} is not known" in said
    assert "reward.judge.api_key_env=NOT_SET is not set in this environment" in said


def test_a_budget_that_is_used_up_ends_the_run_and_a_higher_one_goes_on(tmp_path: Path, model: Path) -> None:
    with judge_server() as server:
        said = failed(asyncrl("run", *words(server, tmp_path, model, "reward.judge.max_calls=60")), 12)
        assert server.calls.total() == 61, "one more for the trial"
        assert "reward.judge.max_calls=60 is used up (60 calls with 6,000 tokens): raise it, or set" in said
        directory = tmp_path / "run"
        done = asyncrl("resume", directory, "reward.judge.max_calls=1000")
        assert done.code == 0, done.out + done.err
    checked(directory)
    assert msgspec.json.decode((directory / "summary.json").read_bytes())["judge"]["calls"] == len(server.bodies) - 1
