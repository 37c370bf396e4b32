"""Plays OpenEnv environments (`openenv-core` 0.3) by text: each turn of the model is an action, each observation its
answer.

    async def agent(prompt, answer, access):
        return await play("http://127.0.0.1:8000", prompt, access, action="message", shown="echoed_message")
"""

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from asyncrl.system.optional import require
from asyncrl.user_code.agents import Access, Outcome

Shown = Callable[[Any], str]


class Step(NamedTuple):
    observation: Any
    reward: float | None
    done: bool


async def play(
    environment: Any,
    prompt: str,
    access: Access,
    *,
    action: str | Callable[[str], Any],
    shown: str | Shown,
    reset: Mapping[str, Any] | None = None,
    max_turns: int = 8,
    score: Callable[[list[float]], float] = sum,
) -> Outcome:
    """One episode.

    `environment`: the URL of a server, a client that is not connected yet, or a function that makes an `Environment`,
    which is then played in this process. `action`: the name of its field for the model's text, or a function that makes
    an action of the text (for a function that makes an `Environment` only the latter). `shown`: the name of the
    observation's field for the model, or a function that makes a text of the observation. `reset` goes to
    `reset(...)`, such as a seed. The first message is the prompt and, if there is one, the first observation.
    `score` makes the reward of the steps' rewards, such as `sum` or `lambda rewards: rewards[-1]`.
    """
    openai = require("openai", extra="openenv")

    def act(text: str) -> Any:
        return action(text) if callable(action) else {action: text}

    shows: Shown = shown if callable(shown) else lambda observation: _field(observation, shown)
    async with _opened(environment) as opened, openai.AsyncOpenAI(base_url=access.url, api_key=access.key) as client:
        step = _step(await _result(opened, "reset", **(reset or {})))
        messages = [{"role": "user", "content": "\n\n".join(filter(None, (prompt, shows(step.observation))))}]
        rewards: list[float] = []
        for _ in range(max_turns):
            if step.done:
                break
            reply = await client.chat.completions.create(model=access.model, messages=messages)
            said = reply.choices[0].message.content or ""
            step = _step(await _result(opened, "step", act(said)))
            rewards.append(float(step.reward or 0.0))
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shows(step.observation)}]
            if reply.choices[0].finish_reason == "length":  # no room is left, or the turn was cut off
                break
    return Outcome(reward=float(score(rewards)) if rewards else 0.0)


@asynccontextmanager
async def _opened(environment: Any) -> AsyncGenerator[Any, None]:
    core = require("openenv.core", extra="openenv")
    if isinstance(environment, str):
        environment = core.GenericEnvClient(base_url=environment)
    if isinstance(environment, core.EnvClient):
        async with environment as client:
            yield client
    else:
        here = environment()
        try:
            yield here
        finally:
            here.close()


async def _result(environment: Any, method: str, *given: Any, **named: Any) -> Any:
    """A client's methods are async; an environment has others of the same names for that."""
    called = getattr(environment, f"{method}_async", None) or getattr(environment, method)
    result = called(*given, **named)
    return await result if inspect.isawaitable(result) else result


def _step(result: Any) -> Step:
    """A client's `StepResult` has an observation; an environment returns the observation itself."""
    return Step(getattr(result, "observation", result), result.reward, result.done)


def _field(observation: Any, name: str) -> str:
    named: Any = observation if isinstance(observation, Mapping) else vars(observation)
    if name not in named:
        raise KeyError(f"the observation has no field {name!r}; it has {', '.join(named)}")
    return str(named[name])
