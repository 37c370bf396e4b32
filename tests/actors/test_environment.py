"""Conversations: what is given is read and never learned, limits hold, and any engine goes on from the segments."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from actors.buffer import BufferActor
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.rollout.generation import Completion, CompletionGenerator
from asyncrl.config import Checkpoint, Flow, Reward, Rollout, Run, WarmStart, check
from asyncrl.config.engine import FakeEngine, NativeEngine
from asyncrl.config.task import ChainsTask
from asyncrl.config.user_code import Environment
from asyncrl.data.arrow import decode
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.models.checkpoint import load_model
from asyncrl.training.batches import block, pack
from asyncrl.training.warm_start import make_model
from asyncrl.types import GIVEN, Delta, Group, Prompt, Request, Sampling, Segment, Slot, Trajectory
from asyncrl.user_code.environments import Conversation, respond
from asyncrl.user_code.protocol import RewardFailure
from tests.actors.test_publisher import model, scene  # pyright: ignore[reportUnusedImport]
from tests.support.routes import routes_of

__all__ = ["model"]
PROMPT = Prompt(uid="p", text="3+4=", answer="7")


class Scripted:
    """An engine that samples given texts, one for each request, and keeps the requests."""

    def __init__(self, encode: Callable[[str], list[int]], *turns: str) -> None:
        self._encode, self._turns = encode, list(turns)
        self.requests: list[Request] = []

    async def submit(self, request: Request) -> AsyncGenerator[Delta, None]:
        version = len(self.requests)
        self.requests.append(request)
        text = self._turns.pop(0)
        finish = "stop" if text.endswith("$") else "length"
        tokens = self._encode(text)
        yield Delta(request.id, Segment.sampled(tokens, [-0.5] * len(tokens), version), finish)

    async def abort(self, request_id: str) -> None: ...


class Replies:
    """Stands for the reward actor: says what was written down, and remembers what it was asked."""

    def __init__(self, *said: str | None) -> None:
        self._said = list(said)
        self.asked: list[Conversation] = []

    async def respond(self, talk: Conversation) -> str | None:
        self.asked.append(talk)
        return self._said.pop(0)


def conversation(
    model: Path, turns: Sequence[str], said: Sequence[str | None], *, max_turns: int = 8, max_tokens: int = 40
) -> tuple[Completion, Scripted, Replies, CompletionGenerator]:
    tokenizer = load_tokenizer(model)
    run = Run(environment=Environment(function="x:y", max_turns=max_turns), rollout=Rollout(max_tokens=max_tokens))
    engine, replies = Scripted(tokenizer.encode, *turns), Replies(*said)
    answering = CompletionGenerator(run, cast(Any, engine), tokenizer, cast(Any, replies))
    opening = Request(
        id="0/0", tokens=tuple(tokenizer.encode(PROMPT.text)), sampling=Sampling(max_tokens=max_tokens), seed=1
    )
    return asyncio.run(answering.converse(opening, PROMPT, 1e12)), engine, replies, answering


def test_what_is_given_is_read_and_only_turns_are_learned(model: Path) -> None:
    answer, engine, replies, answering = conversation(model, ["a3$", "b$"], ["=7", None])
    assert [talk.turns for talk in replies.asked] == [("a3$",), ("a3$", "=7", "b$")]
    assert [(s.version, len(s)) for s in answer.segments] == [(0, 3), (GIVEN, 2), (1, 2)]
    judged = answering.reward_input(PROMPT, answer)
    assert (judged.completion, judged.turns) == ("b$", ("a3$", "=7", "b$"))

    encode = load_tokenizer(model).encode
    prompt, first, given, second = map(encode, (PROMPT.text, "a3$", "=7", "b$"))
    second_request = engine.requests[1]
    assert second_request.tokens == (*prompt, *first, *given)
    assert (second_request.resumed, second_request.sampling.max_tokens) == (0, 40 - 5)
    assert second_request.seed != engine.requests[0].seed

    trajectory = Trajectory(
        slot=Slot(0, 0), prompt="p", segments=(Segment.given(prompt), *answer.segments), reward=1.0, finish="stop",
        started=0.0, finished=1.0, engine="e",
    )  # fmt: skip
    (batch,) = pack([block(Group(id=0, trajectories=(trajectory,)), [1.0])], 1000)
    # Positions: 0-3 prompt, 4-6 first turn, 7-8 given, 9-10 second turn. Each is predicted at the one before.
    assert batch.predict_L.tolist() == [3, 4, 5, 8, 9]
    assert batch.target_L.tolist() == [*first, *second]
    assert batch.version_L.tolist() == [0, 0, 0, 1, 1]
    assert batch.tokens_T.tolist() == [*prompt, *first, *given, *second[:-1]]


def test_turns_and_tokens_are_limited(model: Path) -> None:
    answer, engine, replies, _ = conversation(model, ["a$", "b$", "c$"], ["=1", "=2", "=3"], max_turns=2)
    assert (len(engine.requests), len(replies.asked), answer.finish) == (2, 1, "stop")
    # Two sampled, two given: the next turn would have nothing left of four.
    answer, engine, _, _ = conversation(model, ["a$", "b$"], ["=1"], max_tokens=4)
    assert (len(engine.requests), answer.finish) == (1, "length")
    assert answer.segments[-1].version != GIVEN
    # A turn that was cut off is no turn to answer to.
    answer, _, replies, _ = conversation(model, ["abc"], [])
    assert (answer.finish, replies.asked) == ("length", [])


def test_an_unwritable_reply_is_the_environments_failure(model: Path) -> None:
    answer, *_ = conversation(model, ["a$"], ["Ä"])
    assert answer.failure is not None
    assert answer.failure.reason == "environment_invalid"
    assert "cannot be written in the model's tokens" in answer.failure.message


def test_a_function_answers_or_ends_or_fails() -> None:
    talk = Conversation("p", ("a",), "7")
    assert respond(lambda prompt, turns, answer: f"{prompt}{turns}{answer}", talk) == "p['a']7"  # pyright: ignore[reportUnknownLambdaType]
    assert respond(lambda *_: None, talk) is None
    for function, reason in ((lambda *_: 3, "environment_invalid"), (lambda: "", "environment_error")):  # pyright: ignore[reportUnknownLambdaType]
        failure = respond(cast(Any, function), talk)
        assert isinstance(failure, RewardFailure)
        assert failure.reason == reason


ECHO = '''
def environment(prompt, turns, answer):
    """Two replies, whatever was said."""
    return "=" + turns[-1][:2].rstrip("$") + "=" if len(turns) < 5 else None

def hangs(prompt, turns, answer):
    import time
    time.sleep(1000)

def reward(prompt, completion, answer, turns):
    return float(len(turns)) + (turns[-1] == completion)
'''


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(ECHO)
    return file


class Heard(RewardActor):
    """Tells when the environment has replied."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.reward, run.environment)
        self.replied = asyncio.Event()

    async def respond(self, talk: Conversation) -> str | RewardFailure | None:
        said = await super().respond(talk)
        self.replied.set()
        return said


async def _generated(run: Run, model: Path, directory: Path, *, leave: bool) -> dict[Slot, Trajectory]:
    """All samples of two groups; with `leave` the engine goes at the first reply, and another takes over."""
    buffer, reward = BufferActor(run, directory), Heard(run)
    rollouts = [RolloutActor(run, model, f"rollout-{i}", buffer, reward) for i in range(2)]
    for rollout in rollouts:
        await rollout.start()
    tickets = (await buffer.admit(1.0))[:2]
    generating = asyncio.create_task(rollouts[0].generate([(ticket, PROMPT) for ticket in tickets]))
    if leave:
        await reward.replied.wait()
        await rollouts[0].drain()
        await generating
        missing, begun = await buffer.reassign([ticket.group for ticket in tickets])
        assert any(part.version == GIVEN for parts in begun.values() for part in parts), "left before a reply came"
        generating = asyncio.create_task(rollouts[1].generate([(ticket, PROMPT) for ticket in missing], begun))
    await generating
    delivery = await buffer.take(2, 2, 10.0)
    found = {t.slot: t for t in map(decode, await buffer.read(delivery))}
    for actor in (*rollouts, reward, buffer):
        await actor.close()
    return found


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = WarmStart(hidden_size=32, heads=2, experts=4, expert_size=16, steps=2, batch_tokens=64)
    return make_model(shape, ChainsTask(), 0, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("kind", ["model", "experts"])
def test_another_engine_goes_on_with_a_conversation(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, functions: Path
) -> None:
    model: Path = request.getfixturevalue(kind)
    run = Run(
        name="test",
        cluster="inprocess",
        model=Checkpoint(path=str(model)),
        engine=NativeEngine(max_batch=8, max_length=256, device="cpu"),
        rollout=Rollout(group_size=2, max_tokens=120),
        flow=Flow(groups_per_step=2, groups_per_take=1),
        environment=Environment(function=f"{functions}:environment"),
        reward=Reward(function=f"{functions}:reward"),
    )
    whole = asyncio.run(_generated(run, model, tmp_path / "a", leave=False))
    handed_over = asyncio.run(_generated(run, model, tmp_path / "b", leave=True))
    assert len(whole) == 4
    assert {slot: t.tokens.tolist() for slot, t in handed_over.items()} == {
        slot: t.tokens.tolist() for slot, t in whole.items()
    }
    assert any(trajectory.finish == "stop" for trajectory in whole.values())
    for slot, trajectory in whole.items():
        assert np.array_equal(trajectory.versions, handed_over[slot].versions)
        replies = [s for s in trajectory.segments[1:] if s.version == GIVEN]
        if trajectory.finish == "stop":
            assert len(replies) == 2
            assert trajectory.reward == 5 + 1
        assert trajectory.route_bytes == handed_over[slot].route_bytes
        if kind == "experts":  # the last token of a turn has its route, too, and so has every reply
            policy, _ = load_model(model)
            assert trajectory.route_bytes == routes_of(policy, trajectory.tokens[:-1].tolist()).tobytes()


def test_a_reply_that_never_comes_drops_the_sample_and_its_group(model: Path, tmp_path: Path, functions: Path) -> None:
    async def check() -> dict[str, int]:
        async with scene(model, tmp_path, probe=False) as at:
            run = at.rollout._run  # pyright: ignore[reportPrivateUsage]
            slow = Environment(function=f"{functions}:hangs", timeout_s=0.2)
            run = msgspec.structs.replace(run, environment=slow)
            reward = RewardActor(run.reward, slow)
            rollout = RolloutActor(run, model, "rollout-1", at.buffer, reward)
            await rollout.start()
            tickets = (await at.buffer.admit(1.0))[:1]
            await rollout.generate([(ticket, PROMPT) for ticket in tickets])
            ledger = await at.buffer.ledger()
            await rollout.close()
            await reward.close()
            assert ledger.balanced
            return ledger.dropped

    assert asyncio.run(check()) == {"environment_timeout": 1, "group_incomplete": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": Environment(max_turns=3)}, "environment.function is not"),
        ({"environment": Environment(function="x:y"), "engine": FakeEngine()}, "engine=fake"),
        ({"environment": Environment(function="x:y", max_turns=1)}, "set 2 or more"),
    ],
)
def test_refused_where_it_does_not_apply(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Run(**settings))
