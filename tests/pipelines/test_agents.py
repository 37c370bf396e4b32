"""Whole runs of an agent: in process, as a program, on Ray with an engine killed, and killed and resumed."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl.buffer.reader import read_admissions, read_run
from asyncrl.models.checkpoint import WEIGHTS
from asyncrl.system.run_directory import RunDirectory, read_events
from asyncrl.training.checkpoint import numbered, read_manifest
from asyncrl.types import Trajectory
from pipelines.cli.check import check
from tests.support.agents import write_harness
from tests.support.command import asyncrl
from tests.support.quickstart_runs import finish, kill_after_step, resume, run, start, summary

PROGRAM = Path(__file__).parents[1] / "support" / "agent_program.py"
SMALL = ("evaluation.prompts=4", "rollout.max_tokens=60")


def _sound(root: Path, steps: int) -> list[Trajectory]:
    """The trajectories of a run that came to its end, each slot once."""
    result = summary(root)
    assert (result["status"], result["steps"], result["ledger"]["consumed"]) == ("ok", steps, steps * 16)
    assert result["staleness_max"] <= 2
    assert abs(result["mismatch_kl"]) < 1e-3
    assert check(root / "run").sound
    _, last = numbered(root / "run" / "checkpoints")[-1]
    consumed = [group for first, end in read_manifest(last).consumed for group in range(first, end + 1)]
    assert len(consumed) == len(set(consumed)) == steps * 4
    found = list(read_run(root / "run" / "trajectories"))
    assert len({each.slot for each in found}) == len(found)
    for each in found:
        assert each.episode is not None
        assert 1 <= len(each.episode.turns) <= 2
    return found


def test_a_program_is_trained(tmp_path: Path, model: Path) -> None:
    finish(start(tmp_path, model, *SMALL, f"agent.command=[python,{PROGRAM}]", "steps=2"), timeout=250)
    assert any(len(each.episode.turns) == 2 for each in _sound(tmp_path, 2) if each.episode)


def test_a_run_of_an_agent_is_replayed_and_its_weights_evaluated_with_the_agent(tmp_path: Path, model: Path) -> None:
    harness, judge = write_harness(tmp_path), tmp_path / "judge.py"
    judge.write_text(
        "def reward(prompt, completion, answer, turns=()):\n"
        "    return len(set(''.join(turns))) + len(set(completion)) / 100\n"  # no turns without the agent
    )
    functions = f"agent.function={harness}:two_turns", f"reward.function={judge}:reward"
    run(tmp_path, model, *SMALL, *functions, "steps=2", "evaluation.right_from=1")
    done = asyncrl("replay", tmp_path / "run", "--evaluate", "--out", str(tmp_path / "again"))
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].startswith("identical: 2 steps again")
    recorded = load_file(tmp_path / "run" / "checkpoints" / "step-2" / WEIGHTS)
    first = load_file(model / WEIGHTS)
    assert not any(first[name].equal(tensor) for name, tensor in recorded.items()), "the run has learned something"
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again["evaluations"]["2"] == summary(tmp_path)["evaluations"]["2"]
    assert again["eval_last"] == 1.0, "which it is with the agent alone"


def kill_actor(role: str, run: Path) -> None:
    """SIGKILL an actor, in the middle of whatever it does."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for process in Path("/proc").iterdir():
            try:
                ours = process.name.isdigit() and f"ASYNCRL_TEST={run}".encode() in (process / "environ").read_bytes()
                if ours and (process / "cmdline").read_bytes().startswith(b"ray::" + role.encode()):
                    return os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.05)
    raise AssertionError(f"no {role} to kill")


@pytest.mark.timeout(550)
def test_an_engine_is_killed_in_the_middle_of_episodes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls go on elsewhere: no harness sees an error, and no sample is dropped."""
    monkeypatch.setenv("ASYNCRL_TEST", str(tmp_path))
    harness = write_harness(tmp_path)
    process = start(
        tmp_path, model, *SMALL, f"agent.function={harness}:two_turns", "cluster=local", "rollout.replicas=2", "steps=6"
    )
    try:
        _reach(tmp_path, 1)
        kill_actor("RolloutActor", tmp_path)
        output = finish(process, timeout=400)
    finally:
        process.kill()
    _sound(tmp_path, 6)
    assert summary(tmp_path)["ledger"]["dropped"] == {}, output
    kinds = [event["kind"] for event in read_events(RunDirectory.open(tmp_path / "run").events)]
    assert kinds.count("engine_lost") == 1, output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cluster", ["inprocess", "local"])
def test_killed_and_resumed(tmp_path: Path, model: Path, cluster: str) -> None:
    """Open episodes are played again, and counted; finished ones are neither lost nor doubled."""
    harness = write_harness(tmp_path)
    process = start(tmp_path, model, *SMALL, f"agent.function={harness}:two_turns", f"cluster={cluster}")
    kill_after_step(process, tmp_path, 1)
    before = {each.slot: each.tokens.tolist() for each in read_run(tmp_path / "run" / "trajectories")}
    admitted = len(read_admissions(tmp_path / "run" / "trajectories")) * 4
    resume(tmp_path / "run")
    events = read_events(RunDirectory.open(tmp_path / "run").events)
    again = sum(event["samples"] for event in events if event["kind"] == "regenerated")
    assert again == admitted - len(before) if cluster == "inprocess" else again <= admitted  # actors outlive the driver
    after = {each.slot: each.tokens.tolist() for each in _sound(tmp_path, 4)}
    assert before.keys() <= after.keys()
    assert all(after[slot] == tokens for slot, tokens in before.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "role",
    ["TrainerActor", *(pytest.param(role, marks=pytest.mark.nightly) for role in ("GatewayActor", "BufferActor"))],
)
def test_an_actor_that_the_run_cannot_do_without_is_killed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The run starts again from its last checkpoint, and asks for the open episodes again."""
    monkeypatch.setenv("ASYNCRL_TEST", str(tmp_path))
    harness = write_harness(tmp_path)
    process = start(tmp_path, model, *SMALL, f"agent.function={harness}:two_turns", "cluster=local", "steps=6")
    try:
        _reach(tmp_path, 2)
        kill_actor(role, tmp_path)
        output = finish(process, timeout=500)
    finally:
        process.kill()
    _sound(tmp_path, 6)
    kinds = [event["kind"] for event in read_events(RunDirectory.open(tmp_path / "run").events)]
    assert kinds.count("restart") == 1, output


def _reach(root: Path, step: int) -> None:
    wanted = root / "run" / "checkpoints" / f"step-{step}"
    deadline = time.monotonic() + 250
    while not wanted.exists():
        assert time.monotonic() < deadline, f"{wanted} did not appear"
        time.sleep(0.01)
