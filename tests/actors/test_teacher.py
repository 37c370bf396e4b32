"""The teacher actor: its answers, how questions come together, and whom a bad sample costs what."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from actors.rollout.delivery import DeliveryQueue
from actors.teacher import Judgement, Taught, TeacherActor, Teachers
from asyncrl.config import Run, Trainer
from asyncrl.config.distillation import Distillation, Teacher
from asyncrl.data.arrow import decode, encode
from asyncrl.types import Floats, Slot, Trajectory
from asyncrl.user_code.failures import ENOUGH
from asyncrl.user_code.protocol import RewardFailure, RewardInput
from tests.support.buffer_stores import trajectory
from tests.support.teaching import likeliest_tokens, sampled_logp
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

Made = list[tuple[Teacher, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two teachers, and the same of transformers."""
    found: Made = []
    for weight, family in ((3.0, "qwen3"), (1.0, "llama")):
        directory = tmp_path_factory.mktemp(family)
        found.append((Teacher(path=str(directory), weight=weight), tiny_checkpoint(directory, family, seed=7)))
    return found


def samples(groups: int, *, vocabulary: int = 48) -> list[Trajectory]:
    return [t for group in make_groups(groups, vocabulary=vocabulary) for t in group.trajectories]


def actor(teacher: Teacher, **trainer: Any) -> TeacherActor:
    return TeacherActor(Run(teachers=(teacher,), trainer=Trainer(**trainer)), teacher)


def floats(judgement: Judgement) -> Floats:
    assert isinstance(judgement, Taught)
    return np.frombuffer(judgement.logprobs, np.float32)


def test_several_teachers_say_their_weighted_mean(made: Made) -> None:
    settings = [teacher for teacher, _ in made]
    asked = samples(2)

    async def ask() -> list[Judgement]:
        return await Teachers(settings, [actor(teacher) for teacher in settings]).judge(asked)

    for each, judgement in zip(asked, asyncio.run(ask()), strict=True):
        with torch.no_grad():
            mean = sum((teacher.weight * sampled_logp(model, each) for teacher, model in made), torch.zeros(1)) / 4
        assert np.allclose(floats(judgement), mean.numpy(), atol=2e-4)


def test_what_is_asked_meanwhile_comes_together_and_each_gets_its_own(made: Made) -> None:
    teacher = made[0][0]
    asked = samples(6)

    async def ask() -> tuple[list[Judgement], TeacherActor]:
        own = actor(teacher)
        answers = await asyncio.gather(*(own.judge([each]) for each in asked))
        return [judgement for (judgement,) in answers], own

    judgements, own = asyncio.run(ask())
    for each, judgement in zip(asked, judgements, strict=True):
        with torch.no_grad():
            assert np.allclose(floats(judgement), sampled_logp(made[0][1], each).numpy(), atol=2e-4)
    stats = asyncio.run(own.stats())
    assert (stats.samples, stats.tokens) == (len(asked), sum(each.sampled_tokens for each in asked))
    assert 0 < stats.busy_seconds <= stats.waited_seconds
    assert own.situation().last_event == "done: log-probabilities of 24 samples", "one forward for all"


def test_the_likeliest_tokens_come_with_the_log_probabilities(made: Made) -> None:
    """Also by way of `Teachers`, and of a question that another joined."""
    teacher, model = made[0]
    run = Run(teachers=(teacher,), distill=Distillation(top_k=3))
    asked = samples(1)

    async def ask() -> list[Judgement]:
        judging = Teachers([teacher], [TeacherActor(run, teacher, 48)])
        answers = await asyncio.gather(*(judging.judge([each]) for each in asked))
        return [judgement for (judgement,) in answers]

    for each, judgement in zip(asked, asyncio.run(ask()), strict=True):
        assert isinstance(judgement, Taught)
        taught = msgspec.structs.replace(
            each, teacher_logprob_bytes=judgement.logprobs, teacher_top_k_bytes=judgement.top_k
        )
        assert np.array_equal(taught.teacher_top_k[:, :3], likeliest_tokens(model, each, 3)[:, :3])
        assert decode(encode(taught)).teacher_top_k_bytes == judgement.top_k


def test_one_bad_sample_costs_no_other_and_is_told(made: Made) -> None:
    good, (bad, *_) = samples(1), samples(1, vocabulary=90)
    bad = msgspec.structs.replace(bad, slot=Slot(8, 3))

    async def ask() -> tuple[list[Judgement], TeacherActor]:
        own = actor(made[0][0])
        return await own.judge([*good, bad]), own

    judgements, own = asyncio.run(ask())
    assert [type(each) for each in judgements] == [Taught] * len(good) + [RewardFailure]
    (failure,) = asyncio.run(own.failures()).first
    assert (failure.field, failure.reason) == ("teachers", "teacher_error")
    assert failure.message.startswith("sample 8/3: ValueError: token ")
    assert asyncio.run(own.failures()).always == ""


def test_a_teacher_that_fails_always_says_so(made: Made) -> None:
    bad = [each for each in samples(ENOUGH // 4 + 2, vocabulary=4000) if max(each.tokens) >= 48]

    async def ask() -> tuple[str, str]:
        own = actor(made[0][0])
        await own.judge(bad[: ENOUGH - 1])
        before = (await own.failures()).always
        await own.judge(bad[:1])
        return before, (await own.failures()).always

    before, after = asyncio.run(ask())
    assert before == ""
    assert after.startswith(f"teacher {made[0][0].path} has failed on every sample so far (32): sample 0/0: ValueError")


def test_closing_waits_for_what_is_computed_and_answers_the_rest(made: Made) -> None:
    async def ask() -> list[Judgement]:
        own = actor(made[0][0], token_budget=10)
        asking = [asyncio.create_task(own.judge([each])) for each in samples(4)]
        await asyncio.sleep(0)  # all are asked
        await asyncio.sleep(0)  # and the first is computed
        await own.close()
        return [judgement for (judgement,) in await asyncio.gather(*asking)]

    judgements = asyncio.run(ask())
    assert [isinstance(each, Taught) for each in judgements] == [True] + [False] * 15


class Kept:
    def __init__(self) -> None:
        self.stored: dict[Slot, list[float]] = {}
        self.failed: dict[Slot, str] = {}

    async def append(self, payloads: list[bytes]) -> None:
        self.stored |= {each.slot: each.teacher_logprobs.tolist() for each in map(decode, payloads)}

    async def fail(self, slot: Slot, reason: str, tokens: int) -> None:
        self.failed[slot] = reason


def test_reward_and_teachers_are_asked_at_the_same_time() -> None:
    """Each waits until the other was asked; a sample needs both."""
    asked = asyncio.Event(), asyncio.Event()
    stages: list[tuple[Slot, str]] = []

    class Judge:
        async def score(self, inputs: list[RewardInput]) -> list[float | RewardFailure]:
            asked[0].set()
            await asked[1].wait()
            return [RewardFailure("reward_error", "") if each.answer == "bad" else 1.0 for each in inputs]

    class Both(Teachers):
        async def judge(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
            asked[1].set()
            await asked[0].wait()
            said = Taught(np.full(5, -0.5, np.float32).tobytes())
            return [RewardFailure("teacher_error", "") if each.slot.group == 2 else said for each in trajectories]

    async def deliver() -> Kept:
        kept = Kept()
        queue = DeliveryQueue(
            cast(Any, kept),
            cast(Any, Judge()),
            lambda slot, stage: stages.append((slot, stage)),
            0.001,
            teachers=Both([Teacher(path="")], []),
        )
        inputs = [RewardInput("", "", answer) for answer in ("good", "bad", "good")]
        await asyncio.gather(*(queue.submit(each, trajectory(n, 0)) for n, each in enumerate(inputs)))
        return kept

    kept = asyncio.run(deliver())
    assert kept.stored == {Slot(0, 0): [-0.5] * 5}
    assert kept.failed == {Slot(1, 0): "reward_error", Slot(2, 0): "teacher_error"}
    assert [stage for slot, stage in stages if slot == Slot(0, 0)] == ["teacher", "append"]
