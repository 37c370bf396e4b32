"""Whole runs with a judge: nothing is lost, nothing is asked twice, the key is nowhere, the cost is in the report.

With pairs, neither a kill nor the death of an actor changes what a completion is compared with.
"""

import json
import re
import sqlite3
import subprocess
import time
from collections import Counter, defaultdict
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.buffer.reader import read_run
from asyncrl.data.arrow import decode
from asyncrl.drop_reasons import DropReason
from asyncrl.judges.judge import verdict_key
from asyncrl.types import Slot, Trajectory
from pipelines.compose import from_yaml
from tests.pipelines.test_agents import kill_actor
from tests.pipelines.test_replay import replay
from tests.support import quickstart_runs
from tests.support.agents import write_harness
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


# -- pairs -----------------------------------------------------------------------------------------------------------

PAIRS = (
    *SMALL[:-2],
    "reward.judge.rubric={long: 'Which is longer?', first: {ask: 'Which comes first?', weight: 3}}",
    "reward.judge.pairs=2",
    "reward.judge.backoff_s=0.02",
)
SHOWN = re.compile(r"<first>\n(.*)\n</first>\n\n<second>\n(.*)\n</second>", re.DOTALL)


def longer(text: str) -> str:
    """The longer one is better, and always the first."""
    found = SHOWN.search(text)
    assert found is not None
    first, second = len(found[1]), len(found[2])
    return f"long: {'tie' if first == second else ('first' if first > second else 'second')}\nfirst: first"


def compared(directory: Path) -> list[Trajectory]:
    """All samples that were stored; each group that is whole has half of all wins."""
    samples, groups = trained(directory), defaultdict[int, list[float]](list)
    for sample in samples:
        share = sample.parts["judge_long"]
        assert sample.parts == {"function": sample.parts["function"], "judge_long": share, "judge_first": 0.5}
        assert sample.reward == pytest.approx(sample.parts["function"] + (share + 3 * 0.5) / 4)
        assert share in (0.0, 0.25, 0.5, 0.75, 1.0)
        groups[sample.slot.group].append(share)
    whole = [shares for shares in groups.values() if len(shares) == 4]
    assert whole
    assert all(sum(shares) == 2.0 for shares in whole)
    assert len({tuple(shares) for shares in whole}) > 1
    return samples


def with_pairs(server: JudgeServer, root: Path, model: Path, *more: str) -> list[str]:
    return [*PAIRS, f"model.path={model}", f"root={root}", f"reward.judge.url={server.url}", *more]


def test_completions_are_compared_with_others_of_their_group(tmp_path: Path, model: Path) -> None:
    with judge_server(longer, faults=Faults(error=0.1, malformed=0.1)) as server:
        done = asyncrl("run", *with_pairs(server, tmp_path, model, "reward.judge.retries=20", "max_staleness=1"))
    assert done.code == 0, done.out + done.err
    directory = tmp_path / "run"
    assert "against 'I do not know.': long=" in done.out
    samples, found = compared(directory), summary(directory)
    assert "verdict     sound" in checked(directory)
    assert (found["ledger"]["dropped"], found["ledger"]["consumed"]) == ({}, 64)
    cost = found["judge"]
    assert cost["by_place"] <= cost["compared"] <= len(samples) + 8, (
        "four pairs in each group, less those of equal texts"
    )
    assert cost["verdicts"] <= 2 * cost["compared"] + 8
    told = asyncrl("report", directory)
    assert told.code == 0, told.err
    assert "pairs were compared, each in both orders" in (directory / "report.html").read_text()
    assert replay(directory).out.splitlines()[-1].startswith("identical: 4 steps again")


@pytest.mark.slow
def test_a_teacher_judges_what_is_compared(tmp_path: Path, model: Path) -> None:
    """What it says is parked with the completion, and nobody asks for it again."""
    taught = f"teachers=[{{path: {model}}}]", "distill.top_k=4", "distill.reward=1"
    with judge_server(longer) as server:
        done = asyncrl("run", *with_pairs(server, tmp_path, model, *taught))
    assert done.code == 0, done.out + done.err
    directory = tmp_path / "run"
    for sample in compared(directory):
        assert len(sample.teacher_logprobs) == sample.sampled_tokens
        assert sample.teacher_top_k.shape == (sample.sampled_tokens, 9)
    assert (summary(directory)["ledger"]["dropped"], summary(directory)["ledger"]["consumed"]) == ({}, 64)
    assert "verdict     sound" in checked(directory)
    assert replay(directory).out.splitlines()[-1].startswith("identical: 4 steps again")


@pytest.mark.slow
def test_episodes_of_an_agent_are_compared(tmp_path: Path, model: Path) -> None:
    """By all that was said in each."""
    harness = f"agent.function={write_harness(tmp_path)}:two_turns"
    with judge_server(longer) as server:
        done = asyncrl("run", *with_pairs(server, tmp_path, model, harness, "rollout.max_tokens=60"))
    assert done.code == 0, done.out + done.err
    directory = tmp_path / "run"
    assert all(sample.episode is not None for sample in compared(directory))
    assert (summary(directory)["ledger"]["dropped"], summary(directory)["ledger"]["consumed"]) == ({}, 64)
    assert "verdict     sound" in checked(directory)
    assert replay(directory).out.splitlines()[-1].startswith("identical: 4 steps again")


def test_a_killed_run_goes_on_with_what_was_parked(tmp_path: Path, model: Path) -> None:
    with judge_server(longer, seconds=0.05) as server:
        more = with_pairs(server, tmp_path, model, "steps=6")[len(quickstart_runs.SMALL) :]
        process = quickstart_runs.start(tmp_path, model, *more)
        quickstart_runs.kill_after_step(process, tmp_path, 2)
        directory = tmp_path / "run"
        before = {each.slot for each in trained(directory)}
        with closing(sqlite3.connect(directory / "judge.sqlite")) as store:
            rows = store.execute("SELECT group_id, sample, trajectory FROM parked").fetchall()
        parked = {Slot(group, sample): decode(payload) for group, sample, payload in rows}
        assert parked
        done = asyncrl("resume", directory)
    assert done.code == 0, done.out + done.err
    after = {each.slot: each for each in compared(directory)}
    for slot in parked.keys() - before:
        assert after[slot].tokens.tolist() == parked[slot].tokens.tolist(), "it was not generated again"
    assert "verdict     sound" in checked(directory)
    assert summary(directory)["ledger"]["dropped"] == {}
    assert replay(directory).out.splitlines()[-1].startswith("identical: 6 steps again")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("actor", ["RewardActor", pytest.param("RolloutActor", marks=pytest.mark.nightly)])
def test_an_actor_is_killed_while_completions_are_compared(
    actor: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is dropped, and no group waits for what nobody generates."""
    monkeypatch.setenv("ASYNCRL_TEST", str(tmp_path))
    with judge_server(longer, seconds=0.05) as server:
        more = with_pairs(server, tmp_path, model, "cluster=local", "rollout.replicas=2", "steps=8")
        process = quickstart_runs.start(tmp_path, model, *more[len(quickstart_runs.SMALL) :])
        try:
            wait_for_parked(process, tmp_path / "run")
            kill_actor(actor, tmp_path)
            output = quickstart_runs.finish(process, timeout=500)
        finally:
            process.kill()
    compared(tmp_path / "run")
    found = summary(tmp_path / "run")
    assert (found["status"], found["steps"], found["ledger"]["dropped"]) == ("ok", 8, {}), output
    assert "verdict     sound" in checked(tmp_path / "run")


def wait_for_parked(process: "subprocess.Popen[str]", directory: Path) -> None:
    """Until the first completions wait."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        if (path := directory / "judge.sqlite").exists():
            with closing(sqlite3.connect(path)) as store, suppress(sqlite3.OperationalError):
                if store.execute("SELECT count(*) FROM parked").fetchone()[0]:
                    return
        time.sleep(0.02)
    raise AssertionError("nothing was parked")
