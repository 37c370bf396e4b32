"""Completions that are compared, from the engine to the buffer: parked, judged in pairs, staged, stored."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from actors.buffer import BufferActor
from actors.reward import RewardActor
from actors.rollout.delivery import DeliveryQueue
from asyncrl.config import Run
from asyncrl.data.arrow import decode
from asyncrl.drop_reasons import DropReason
from asyncrl.system.user_functions import keep_here
from asyncrl.types import Slot, Trajectory
from asyncrl.user_code.protocol import RewardInput
from asyncrl.user_code.score import Score
from asyncrl.user_code.stages import Drop, Sample
from pipelines.compose import compose
from tests.support.buffer_stores import trajectory
from tests.support.judge_server import JudgeServer, judge_server

GROUP = 4


def longer(text: str) -> str:
    """Compares what is shown by its length."""
    found = re.search(r"<first>\n(.*)\n</first>.*<second>\n(.*)\n</second>", text, re.DOTALL)
    assert found is not None
    first, second = len(found[1]), len(found[2])
    return "tie" if first == second else ("first" if first > second else "second")


def length(prompt: str, completion: str, answer: str) -> float:
    return float(len(completion))


def no_odd_ones(samples: list[Sample]) -> list[Sample | Drop]:
    return [Drop("odd") if len(each.completion) % 2 else each for each in samples]


class Actors:
    """Those that a sample passes, on the directory of a run."""

    def __init__(
        self,
        server: JudgeServer,
        directory: Path,
        *more: str,
        function: str,
        stages: tuple[str, ...],
        restore_step: int | None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        rubric = "reward.judge.rubric.long='Which is longer?'"
        judge = (f"reward.judge.url={server.url}", "reward.judge.model=m", rubric, "reward.judge.pairs=2")
        settings = (f"rollout.group_size={GROUP}", "evaluation.prompts=0", f"reward.function={function}")
        self.run: Run = compose([*judge, *settings, *more])
        self.buffer = BufferActor(self.run, directory / "trajectories", restore_step)
        verdicts = directory / "judge.sqlite"
        self.reward = RewardActor(self.run.reward, None, stages, verdicts, None, self.buffer)
        self.queue = DeliveryQueue(
            self.buffer, self.reward, lambda slot, stage: None, 0.001, staged=bool(stages), compared=True
        )

    async def submit(self, sample: int, completion: str) -> None:
        await self.queue.submit(RewardInput("p", completion, "a"), trajectory(0, sample))

    async def stored(self) -> dict[int, Trajectory]:
        """The samples of the group, once it is complete."""
        delivery = await self.buffer.take(1, 1, timeout_s=30)
        return {each.slot.sample: each for each in map(decode, await self.buffer.read(delivery))}

    async def close(self) -> None:
        await self.queue.close()
        await self.reward.close()
        await self.buffer.close()


def using(
    directory: Path,
    work: Callable[[Actors], Awaitable[None]],
    *more: str,
    function: str = "",
    stages: tuple[str, ...] = (),
    restore_step: int | None = None,
) -> None:
    async def run(server: JudgeServer) -> None:
        actors = Actors(server, directory, *more, function=function, stages=stages, restore_step=restore_step)
        try:
            await actors.reward.start()
            if restore_step is None:
                await actors.buffer.admit(timeout_s=5)
            await work(actors)
        finally:
            await actors.close()

    with judge_server(longer) as server:
        asyncio.run(run(server))


def test_each_completion_is_stored_with_its_share_of_wins(tmp_path: Path) -> None:
    async def work(actors: Actors) -> None:
        for sample, completion in ((2, "ccc"), (0, "a"), (3, "dddd")):
            await actors.submit(sample, completion)  # which does not wait for the others
        assert await actors.reward.parked([0, 1]) == [Slot(0, sample) for sample in (2, 0, 3)]
        assert [at.stage for at in actors.reward.situation().samples] == ["compare"] * len(
            actors.reward.situation().samples
        )
        await actors.submit(1, "bb")
        stored = await actors.stored()
        assert {sample: each.reward for sample, each in stored.items()} == {0: 1.0, 1: 2.5, 2: 3.5, 3: 5.0}
        assert stored[1].parts == {"function": 2.0, "judge_long": 0.5}
        stats = await actors.reward.judge_stats()
        assert stats is not None
        assert (stats.calls, stats.compared) == (8, 4)

    using(tmp_path / "run", work, function=keep_here(length, "test/length"))


def test_the_judge_alone_and_stages_after_it(tmp_path: Path) -> None:
    async def work(actors: Actors) -> None:
        for sample in range(GROUP):
            await actors.submit(sample, "x" * (sample + 2))
        stored = await actors.stored()
        assert {sample: (each.reward, each.parts) for sample, each in stored.items()} == {
            0: (0.0, {"judge_long": 0.0}),
            2: (0.5, {"judge_long": 0.5}),
        }
        assert (await actors.buffer.ledger()).dropped == {"stage:odd": 2}

    stage = keep_here(no_odd_ones, "test/no_odd_ones")
    using(tmp_path / "run", work, "flow.incomplete=train_rest", stages=(stage,))


def test_one_that_fails_elsewhere_is_not_waited_for(tmp_path: Path) -> None:
    async def work(actors: Actors) -> None:
        for sample in (0, 1, 3):
            await actors.submit(sample, "x" * (sample + 1))
        await actors.buffer.fail(Slot(0, 2), DropReason.ENGINE_ERROR)
        stored = await actors.stored()
        assert {sample: each.reward for sample, each in stored.items()} == {0: 0.0, 1: 0.5, 3: 1.0}

    using(tmp_path / "run", work, "flow.incomplete=train_rest")


def test_a_group_that_is_dropped_leaves_nothing_behind(tmp_path: Path) -> None:
    async def work(actors: Actors) -> None:
        await actors.submit(0, "a")
        await actors.buffer.fail(Slot(0, 2), DropReason.ENGINE_ERROR, tokens=3)
        while await actors.reward.parked([0]):  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.01)
        assert (await actors.buffer.ledger()).dropped == {DropReason.ENGINE_ERROR: 1, DropReason.GROUP_INCOMPLETE: 3}
        assert await actors.buffer.waste() == {DropReason.ENGINE_ERROR: 3, DropReason.GROUP_INCOMPLETE: 5}

    using(tmp_path / "run", work)


def test_what_has_a_reward_of_its_own_is_not_compared(tmp_path: Path) -> None:
    async def work(actors: Actors) -> None:
        await actors.queue.submit(RewardInput("p", "own", "a"), trajectory(0, 0), Score(7.0))
        for sample in (1, 2, 3):
            await actors.submit(sample, "x" * sample)
        stored = await actors.stored()
        assert {sample: each.reward for sample, each in stored.items()} == {0: 7.0, 1: 0.0, 2: 0.5, 3: 1.0}

    using(tmp_path / "run", work)


def test_what_was_parked_when_the_run_was_killed_is_not_generated_again(tmp_path: Path) -> None:
    """The buffer had stored the first, and lacks two that are parked and one that is not there."""

    async def first(actors: Actors) -> None:
        for sample in (0, 1, 3):
            await actors.submit(sample, "x" * (sample + 1))
        while await actors.buffer.awaited([0]) != {0: (1, 2, 3)}:  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.01)

    async def second(actors: Actors) -> None:
        (ticket,) = [each for each in await actors.buffer.reissue() if each.group == 0]
        parked = set(await actors.reward.parked([0]))
        assert [sample for sample in ticket.samples if Slot(0, sample) not in parked] == [2]
        await actors.submit(2, "xxx")
        stored = await actors.stored()
        assert {sample: each.reward for sample, each in stored.items()} == {0: 0.0, 1: 0.5, 2: 0.5, 3: 1.0}
        stats = await actors.reward.judge_stats()
        assert stats is not None
        assert stats.calls == 8, "of both attempts: no pair was asked about twice"

    using(tmp_path / "run", first)
    using(tmp_path / "run", second, restore_step=0)
