"""Stages between the reward and the buffer: what they return is checked, what they drop is counted."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from actors.reward import RewardActor
from actors.rollout.delivery import DeliveryQueue
from asyncrl.config import Reward
from asyncrl.data.arrow import decode
from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import keep_here
from asyncrl.types import Segment, Slot, Trajectory
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult
from asyncrl.user_code.score import Score
from asyncrl.user_code.stages import Drop, Sample, pass_through

FUNCTIONS = """
from asyncrl.user_code.stages import Drop

def short(samples):
    return [sample if sample.tokens < 3 else Drop("too_long") for sample in samples]

async def doubled(samples):
    return [sample.rewarded(2 * sample.reward) for sample in samples]

def broken(samples):
    raise ValueError("no stage")
"""


def sample(index: int, tokens: int, reward: float = 1.0) -> Sample:
    return Sample("p", "c" * tokens, "a", trajectory(index, tokens, reward))


def trajectory(index: int, tokens: int, reward: float = 0.0) -> Trajectory:
    return Trajectory(
        slot=Slot(0, index),
        prompt="p",
        segments=(Segment.given([1]), Segment.sampled([2] * tokens, [-1.0] * tokens, 0)),
        reward=reward,
        finish="stop",
        started=0.0,
        finished=1.0,
        engine="e",
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "stages.py").write_text(FUNCTIONS)
    return tmp_path / "stages.py"


def passed(actor: RewardActor, *samples: Sample) -> list[RewardResult]:
    async def run() -> list[RewardResult]:
        await actor.start()
        try:
            return await actor.stage(samples)
        finally:
            await actor.close()

    return asyncio.run(run())


def test_one_after_the_other_and_what_is_dropped_goes_no_further(file: Path) -> None:
    actor = RewardActor(Reward(), after=(f"{file}:short", f"{file}:doubled"))
    first, second, third = passed(actor, sample(0, 1, 0.5), sample(1, 5), sample(2, 2, -1.0))
    assert (first, third) == (Score(1.0), Score(-2.0))
    assert isinstance(second, RewardFailure)
    assert second.reason == "stage:too_long"


def test_a_stage_that_fails_fails_its_samples(file: Path) -> None:
    actor = RewardActor(Reward(), after=(f"{file}:broken",))
    results = passed(actor, sample(0, 1), sample(1, 1))
    assert [cast(RewardFailure, result).reason for result in results] == ["stage_error"] * 2
    found = asyncio.run(actor.failures())
    (failure,) = found.first
    assert failure.message.startswith("ValueError: no stage (")
    assert failure.source == 'raise ValueError("no stage")'
    assert not found.always, "two samples are not enough to tell"
    with pytest.raises(ConfigError, match=r"stages=.*stages\.py:none cannot be used.*called as f\(samples: list"):
        passed(RewardActor(Reward(), after=(f"{file}:none",)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda samples: None, "a list with one item for each of its 2 samples"),
        (lambda samples: samples[:1], "a list with one item for each of its 2 samples"),
        (lambda samples: [1.0, 2.0], r"a Sample with a finite reward, or Drop\(reason\)"),
        (lambda samples: [s.rewarded(float("nan")) for s in samples], "a Sample with a finite reward"),
        (
            lambda samples: [s.rewarded({"judge": float("inf")}) for s in samples],
            "under names of up to 40 small letters",
        ),
        (lambda samples: [Drop("Bad reason!")], "a reason is a word such as too_long"),
    ],
)
def test_what_a_stage_returns_is_checked(function: Callable[..., Any], message: str) -> None:
    result = pass_through(function, [sample(0, 1), sample(1, 1)])
    assert isinstance(result, RewardFailure)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(result.message)


class Kept:
    """Stands for the buffer."""

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}
        self.parts: dict[int, dict[str, float]] = {}
        self.failed: dict[int, tuple[str, int]] = {}

    async def append(self, payloads: list[bytes]) -> None:
        self.rewards |= {t.slot.sample: t.reward for t in map(decode, payloads)}
        self.parts |= {t.slot.sample: t.parts for t in map(decode, payloads)}

    async def fail(self, slot: Slot, reason: str, tokens: int) -> None:
        self.failed[slot.sample] = reason, tokens


def test_the_buffer_gets_the_last_rewards_and_the_reasons_of_the_rest() -> None:
    kept = Kept()

    def length(prompt: str, completion: str, answer: str) -> float:
        return float(len(completion))

    def halve(samples: list[Sample]) -> list[Sample | Drop]:
        return [each.rewarded(each.reward / 2) if each.reward > 1 else Drop("dull") for each in samples]

    async def run() -> None:
        actor = RewardActor(Reward(function=keep_here(length, "test/reward")), after=(keep_here(halve, "test/stage"),))
        outbox = DeliveryQueue(cast(Any, kept), actor, lambda slot, stage: None, 0.001, staged=True)
        answers = [(RewardInput("p", "c" * n, ""), trajectory(n, n)) for n in (1, 2, 4)]
        await asyncio.gather(*(outbox.submit(*answer) for answer in answers))
        await actor.close()

    asyncio.run(run())
    assert kept.rewards == {2: 1.0, 4: 2.0}
    assert kept.failed == {1: ("stage:dull", 1)}


def test_parts_pass_through_stages_that_keep_change_add_or_clear_them() -> None:
    kept = Kept()

    def graded(prompt: str, completion: str, answer: str) -> dict[str, float]:
        return {"length": float(len(completion)), "format": 0.5}

    def judge(samples: list[Sample]) -> list[Sample]:
        ways = {1: 9.0, 2: {**samples[0].parts, "judge": 0.25}, 3: Score(7.0, {"own": 1.0}), 4: Score(8.0)}
        return [sample.rewarded(ways.get(sample.tokens, sample.reward)) for sample in samples]

    def after(samples: list[Sample]) -> list[Sample]:
        return samples

    async def run() -> None:
        stages = (keep_here(judge, "test/judge"), keep_here(after, "test/after"))
        actor = RewardActor(Reward(function=keep_here(graded, "test/graded")), after=stages)
        outbox = DeliveryQueue(cast(Any, kept), actor, lambda slot, stage: None, 0.001, staged=True)
        for n in (1, 2, 3, 4, 5):
            await outbox.submit(RewardInput("p", "c" * n, ""), trajectory(n, n))
        await actor.close()

    asyncio.run(run())
    assert kept.rewards == {1: 9.0, 2: 2.75, 3: 7.0, 4: 8.0, 5: 5.5}
    assert kept.parts == {
        1: {"length": 1.0, "format": 0.5},
        2: {"length": 2.0, "format": 0.5, "judge": 0.25},
        3: {"own": 1.0},
        4: {},
        5: {"length": 5.0, "format": 0.5},
    }
