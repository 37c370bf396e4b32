"""Plays environments of `verifiers` 0.4: their harness, tools and rewards, with the policy as their model.

A program of an environment samples from verifiers' own server in this process, which passes each call on to the
gateway. That server, and the tools that episodes share, live as long as `_Served`.
"""

import asyncio
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.data.reward_parts import MOST
from asyncrl.system.optional import require
from asyncrl.user_code.agents import Access, Outcome
from asyncrl.user_code.score import Score

EPISODES = 100
"""That one server plays. It keeps a client for each endpoint, and each episode has an endpoint of its own."""


class Question(msgspec.Struct, frozen=True):
    """What `Prompt.answer` holds, as JSON."""

    environment: str
    args: dict[str, Any]
    task: dict[str, Any]

    def encoded(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def key(self) -> bytes:
        return msgspec.json.encode((self.environment, self.args))


async def agent(prompt: str, answer: str, access: Access) -> Outcome:
    """One episode of the task that `answer` holds."""
    vf = require("verifiers.v1", extra="verifiers")
    question = msgspec.json.decode(answer, type=Question)
    served = await _serve(question)
    variable = f"{access.url}_API_KEY"  # a key is read from here, and programs do not inherit what has this ending
    os.environ[variable] = access.key
    try:
        task = served.env.taskset.task_type()
        data = task.data_type().model_validate(question.task)
        client = vf.EvalClientConfig(base_url=access.url, api_key_var=variable)
        context = vf.ModelContext(access.model, client)
        return _outcome(await served.env.run_episode(task(data, served.env.config.taskset.task), context), access)
    finally:
        del os.environ[variable]
        served.left()


def reward(prompt: str, completion: str, answer: str) -> float:
    """Never called: `agent` returns the reward. It stands where a run names its judge."""
    raise RuntimeError("task=verifiers has its rewards from the environment: set agent.function to its harness")


def _outcome(episode: Any, access: Access) -> Outcome:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(["the environment failed", *(f"{each.type}: {each.message}" for each in errors)]))
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.base_url == access.url:
            name = trace.agent.name
            raise RuntimeError(f"agent {name!r} is not trained, yet plays as the policy: set task.args.{name}.client")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        return Outcome(reward=sum(trace.reward for trace in trained) / len(trained))
    found = {name: each.value for name, each in trained[0].rewards.items() if each is not None}
    parts = {re.sub(r"[^a-z0-9_]+", "_", name.lower())[:40]: value for name, value in found.items()}
    return Outcome(reward=Score(trained[0].reward, parts if len(parts) <= MOST else {}))


def environment_config(environment: str, args: Mapping[str, Any]) -> Any:
    """Checked by the environment's own rules. An agent without a harness of its own is a chat with the task's tools,
    and runs beside the gateway; verifiers itself would take its provider's machines, and a shell."""
    loaders = require("verifiers.v1.utils.loaders", extra="verifiers")
    chosen: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(args))
    chosen["taskset"] = {**chosen.get("taskset", {}), "id": environment}
    for role, default in _roles(loaders.env_config_type(environment, chosen.get("id", ""))).items():
        given = chosen.setdefault(role, {})
        if "runtime" not in given and "runtime" not in default.model_fields_set:
            given["runtime"] = {"type": "subprocess"}
        bundled = default.harness is not None or loaders.default_harness_id(environment) == environment
        if "harness" not in given and not bundled:
            given["harness"] = {"id": "null"}
    return loaders.resolve_env_config(chosen)


def taskset(config: Any) -> Any:
    """An iterable of its tasks, that can be iterated over again."""
    return require("verifiers.v1", extra="verifiers").load_taskset(config.taskset)


def _roles(config: Any) -> dict[str, Any]:
    """Its agents, with their author's settings."""
    seat = require("verifiers.v1", extra="verifiers").AgentConfig
    return {name: field.default for name, field in config.model_fields.items() if isinstance(field.default, seat)}


class _Served:
    """An environment with its server and shared tools, for `EPISODES` episodes."""

    def __init__(self, question: Question) -> None:
        vf = require("verifiers.v1", extra="verifiers")
        self.env = vf.load_environment(environment_config(question.environment, question.args))
        self.begun = self.playing = 0
        self._over = asyncio.Event()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            async with self.env.serving():
                self.ready.set_result(None)
                await self._over.wait()
        except Exception as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)

    def left(self) -> None:
        self.playing -= 1
        if self.begun >= EPISODES and not self.playing:
            self._over.set()


_serving: dict[bytes, _Served] = {}
"""Of this process, which has one event loop."""


async def _serve(question: Question) -> _Served:
    """For one more episode."""
    served = _serving.get(question.key)
    if served is None or served.begun >= EPISODES:
        served = _serving[question.key] = _Served(question)
    served.begun += 1
    served.playing += 1
    try:
        await asyncio.shield(served.ready)
    except BaseException:
        served.left()
        if served.ready.done() and served.ready.exception() and _serving.get(question.key) is served:
            del _serving[question.key]  # the next episode tries again
        raise
    return served
