"""Actors of a run of an agent in one process, and harnesses that speak HTTP with the standard library alone."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from actors.buffer import BufferActor
from actors.gateway.actor import GatewayActor
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.trainer.actor import TrainerActor
from asyncrl.config import Checkpoint, Flow, Reward, Rollout, Run, Weights
from asyncrl.config.engine import NativeEngine
from asyncrl.config.user_code import Agent
from asyncrl.data.arrow import decode
from asyncrl.types import Prompt, Slot, Ticket, Trajectory

HARNESS = '''
import asyncio, json, os, time, urllib.request
from urllib.error import HTTPError

def chat(access, messages, **options):
    """One call; the text of the reply."""
    body = json.dumps({"model": access.model, "messages": messages, **options}).encode()
    headers = {"Authorization": f"Bearer {access.key}", "Content-Type": "application/json"}
    call = urllib.request.Request(access.url + "/chat/completions", body, headers)
    with urllib.request.urlopen(call) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

def two_turns(prompt, answer, access):
    messages = [{"role": "user", "content": prompt}]
    messages.append({"role": "assistant", "content": chat(access, messages, max_tokens=8)})
    messages.append({"role": "user", "content": "1+1="})
    return chat(access, messages)

async def patient(prompt, answer, access):
    """Two calls with a slow tool in between."""
    messages = [{"role": "user", "content": prompt}]
    await asyncio.to_thread(chat, access, messages, max_tokens=4)
    await asyncio.sleep(20)
    return await asyncio.to_thread(chat, access, messages, max_tokens=4)

async def as_a_task(prompt, answer, access):
    return await asyncio.to_thread(two_turns, prompt, answer, access)

def outcome(prompt, answer, access):
    from asyncrl.user_code.agents import Outcome
    two_turns(prompt, answer, access)
    return Outcome(reward={"right": 0.5, "style": 0.25}, turn_rewards=(0.0, 1.0))

def wrong_turn_rewards(prompt, answer, access):
    from asyncrl.user_code.agents import Outcome
    two_turns(prompt, answer, access)
    return Outcome(turn_rewards=(1.0,))

def silent(prompt, answer, access):
    return "42"

def raises(prompt, answer, access):
    chat(access, [{"role": "user", "content": prompt}])
    raise ValueError("after a call")

def slow(prompt, answer, access):
    chat(access, [{"role": "user", "content": prompt}])
    time.sleep(1000)

def branches(prompt, answer, access):
    chat(access, [{"role": "user", "content": prompt}], max_tokens=4)
    chat(access, [{"role": "user", "content": "7+8="}], max_tokens=4)

def many_turns(prompt, answer, access):
    messages = [{"role": "user", "content": prompt}]
    try:
        while True:
            messages.append({"role": "assistant", "content": chat(access, messages, max_tokens=4)})
            messages.append({"role": "user", "content": "+1="})
    except HTTPError as error:
        return "no room" if "context" in error.read().decode() else None

def gives_up(prompt, answer, access):
    """Its client does not wait for a long reply."""
    import socket
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": prompt}]}).encode()
    host, _, port = access.url.split("/")[2].partition(":")
    with socket.create_connection((host, int(port))) as line:
        path = "/" + access.url.split("/", 3)[3] + "/chat/completions"
        head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {access.key}\\r\\n"
        head += f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
        line.sendall(head.encode() + body)
        time.sleep(float(answer))
    return chat(access, [{"role": "user", "content": prompt}], max_tokens=4)

def reward(prompt, completion, answer, turns=()):
    return float(len(turns)) + (completion == turns[-1] if turns else 0.0)
'''
PROMPT = Prompt(uid="p", text="3+4=", answer="7")


def write_harness(directory: Path) -> Path:
    path = directory / "harness.py"
    path.write_text(HARNESS)
    return path


def agent_run(model: Path, harness: Path, function: str, **agent: Any) -> Run:
    return Run(
        name="test",
        cluster="inprocess",
        model=Checkpoint(str(model)),
        engine=NativeEngine(max_batch=8, max_length=256, device="cpu"),
        rollout=Rollout(group_size=2, max_tokens=60),
        flow=Flow(groups_per_step=2, groups_per_take=1, max_ready_groups=0),
        weights=Weights(probe=False),
        agent=Agent(function=f"{harness}:{function}", **agent),
        reward=Reward(function=f"{harness}:reward"),
    )


class Played:
    """Actors around two engines."""

    def __init__(self, run: Run, model: Path, directory: Path) -> None:
        self.run = run
        self.buffer = BufferActor(run, directory / "trajectories")
        self.reward, self.gateway = RewardActor(run.reward), GatewayActor(run, model)
        self.rollouts = [
            RolloutActor(run, model, f"rollout-{i}", self.buffer, self.reward, gateway=self.gateway) for i in range(2)
        ]
        self.trainer = TrainerActor(run, model, directory / "checkpoints", self.buffer)
        self.rollout = self.rollouts[0]

    async def tickets(self, groups: int) -> list[Ticket]:
        return (await self.buffer.admit(1.0))[:groups]

    def generate(self, tickets: Sequence[Ticket], engine: int = 0, prompt: Prompt = PROMPT) -> "asyncio.Task[None]":
        return asyncio.create_task(self.rollouts[engine].generate([(ticket, prompt) for ticket in tickets]))

    async def trained(self, groups: int) -> dict[Slot, Trajectory]:
        delivery = await self.buffer.take(groups, groups, 30.0)
        return {t.slot: t for t in map(decode, await self.buffer.read(delivery))}


@asynccontextmanager
async def playing(run: Run, model: Path, directory: Path) -> AsyncGenerator[Played, None]:
    at = Played(run, model, directory)
    await asyncio.gather(at.gateway.start(), at.reward.start(), *(rollout.start() for rollout in at.rollouts))
    try:
        yield at
    finally:
        for actor in (*at.rollouts, at.gateway, at.reward, at.trainer, at.buffer):
            await actor.close()


def with_limits(run: Run, **rollout: Any) -> Run:
    return msgspec.structs.replace(run, rollout=msgspec.structs.replace(run.rollout, **rollout))
