"""An environment of verifiers, from its tasks to its rewards, through a real gateway. verifiers cannot be installed
beside the newest clients of OpenAI and MCP, which the other tests need: `make test-adapters`."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config.run import load
from asyncrl.config.task import VerifiersTask
from asyncrl.errors import ConfigError
from asyncrl.harnesses import verifiers
from asyncrl.tasks.registry import make_task
from asyncrl.user_code.agents import Outcome
from asyncrl.user_code.score import Score
from tests.support import needs
from tests.support.agent_examples import EXAMPLES, run_example
from tests.support.gateways import RunningGateway, Script, running_gateway

pytest.importorskip("verifiers", reason=needs.package("verifiers"))
SUMS = VerifiersTask(environment="own_taskset", held_out=0.1)


@pytest.fixture(autouse=True)
def _taskset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def _play(gateway: RunningGateway, *replies: tuple[str, ...], task: VerifiersTask = SUMS) -> list[Outcome]:
    """An episode for each script, all at once in one event loop."""
    prompt = make_task(task, 0).prompt("train", 0)
    accesses = [gateway.open(Script(*each), name=f"{i}-0") for i, each in enumerate(replies)]

    async def play() -> list[Any]:
        return await asyncio.gather(
            *(verifiers.agent(prompt.text, prompt.answer, each) for each in accesses), return_exceptions=True
        )

    return asyncio.run(play())


def test_prompts_are_the_tasks_with_all_that_playing_them_takes() -> None:
    task = make_task(SUMS, seed=3)
    train = {task.prompt("train", i).text for i in range(90)}
    held_out = {task.prompt("held_out", i).text for i in range(10)}
    assert len(train) == 90
    assert len(held_out) == 10
    assert not train & held_out
    prompt = task.prompt("train", 0)
    question = msgspec.json.decode(prompt.answer, type=verifiers.Question)
    assert question.environment == "own_taskset"
    assert question.task["prompt"] == prompt.text
    assert question.task["answer"] == str(sum(map(int, prompt.text[:-1].split("+"))))


def test_an_episode_calls_tools_and_brings_the_reward_of_the_environment() -> None:
    prompt = make_task(SUMS, 0).prompt("train", 0)
    sums = prompt.text[:-1]
    right = msgspec.json.decode(prompt.answer, type=verifiers.Question).task["answer"]
    call = f"<call>calculate {json.dumps({'expression': sums})}</call>"
    with running_gateway() as gateway:
        outcomes = _play(gateway, (call, f"it is {right}"), ("it is 3",), ("",))
        assert outcomes[:2] == [
            Outcome(reward=Score(1.0, {"correct": 1.0})),
            Outcome(reward=Score(0.0, {"correct": 0.0})),
        ]
        record = gateway.do(gateway.server.end("0-0"))
    _, episode = record.trajectory()
    assert len(episode.turns) == 2
    assert not episode.branches
    assert not [name for name in os.environ if name.endswith("_API_KEY") and "127.0.0.1" in name]


def test_a_server_of_verifiers_is_replaced_after_some_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a client for every episode."""
    monkeypatch.setattr(verifiers, "EPISODES", 2)
    opened: list[str] = []
    serve = verifiers._Served._serve

    async def counted(served: Any) -> None:
        opened.append("open")
        try:
            await serve(served)
        finally:
            opened.append("closed")

    monkeypatch.setattr(verifiers._Served, "_serve", counted)
    with running_gateway() as gateway:
        outcomes = _play(gateway, *[("it is 3",)] * 4)
    assert [type(each) for each in outcomes] == [Outcome] * 4
    assert opened.count("open") == 2
    assert opened.count("closed") == 2


def test_what_fails_in_the_environment_fails_the_episode() -> None:
    with running_gateway() as gateway:
        (error,) = _play(gateway, ("<call>calculate {}</call>",))
    assert isinstance(error, RuntimeError)
    assert "the environment failed; HarnessError" in str(error)
    assert "KeyError" in str(error)


@pytest.mark.parametrize(
    ("environment", "args", "said"),
    [
        ("no-such-taskset", {}, "install the package of the environment"),
        ("own_taskset", {"agent": {"turns": 3}}, "compare task.args with its settings"),
        (
            "own_taskset",
            {"agent": {"harness": {"id": "bash"}}},
            "task.args.agent.harness.id=bash runs the model's commands",
        ),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(environment: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_task(VerifiersTask(environment=environment, args=args), 0)


def test_only_its_own_harness_plays_it() -> None:
    task = {"type": "verifiers", "environment": "own_taskset"}
    reward = {"function": VerifiersTask.judge}
    with pytest.raises(ConfigError, match=r"set agent.function=asyncrl.harnesses.verifiers:agent"):
        load({"task": task, "reward": reward})


@pytest.mark.slow
def test_the_example_trains(tmp_path: Path) -> None:
    run_example("own_taskset.py", tmp_path)
