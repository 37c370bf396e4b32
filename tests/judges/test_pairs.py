"""Completions of a group against each other: fair, whatever their order, and never waiting for who does not come."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.judge import Item, Judge
from asyncrl.drop_reasons import DropReason
from asyncrl.judges.form import Asked
from asyncrl.judges.judge import ModelJudge, Verdict
from asyncrl.judges.pairs import ENDED, PairJudge, opponents
from asyncrl.judges.store import Parked, VerdictStore
from asyncrl.types import Slot
from asyncrl.user_code.protocol import RewardFailure, RewardInput
from tests.support.judge_server import JudgeServer, judge_server

BODIES = re.compile(r"<first>\n(.*)\n</first>.*<second>\n(.*)\n</second>", re.DOTALL)


def shown(text: str) -> tuple[str, str]:
    found = BODIES.search(text)
    assert found is not None
    return found[1], found[2]


def larger(text: str) -> str:
    """The larger number is better; both of the same last digit are equally nice."""
    first, second = map(int, shown(text))
    better = "tie" if first == second else ("first" if first > second else "second")
    return f'{{"large": "{better}", "nice": "{"tie" if first % 10 == second % 10 else better}"}}'


class Delivered(NamedTuple):
    slot: Slot
    verdict: Verdict


class Buffer:
    """Who is still to come, and what has come."""

    def __init__(self, awaited: dict[int, set[int]] | None) -> None:
        self.awaited = awaited
        self.delivered: list[Delivered] = []
        self.news = asyncio.Event()

    async def missing(self, groups: list[int]) -> dict[int, tuple[int, ...]] | None:
        if self.awaited is None:
            return None
        return {group: tuple(self.awaited[group]) for group in groups if self.awaited.get(group)}

    async def deliver(self, parked: Parked, verdict: Verdict, waited_s: float) -> None:
        assert waited_s >= 0
        assert parked.trajectory == b"%d" % parked.slot.sample
        self.delivered.append(Delivered(parked.slot, verdict))
        if self.awaited is not None:
            self.awaited[parked.slot.group].discard(parked.slot.sample)
        self.news.set()

    async def until(self, number: int) -> dict[int, Verdict]:
        """By sample, when so many have come."""
        while len(self.delivered) < number:
            self.news.clear()
            await self.news.wait()
        return {slot.sample: verdict for slot, verdict in sorted(self.delivered)}


def parked(sample: int, text: object = None, group: int = 0) -> Parked:
    return Parked(Slot(group, sample), RewardInput("p", str(sample if text is None else text), "a"), b"%d" % sample)


Work = Callable[[PairJudge, Buffer, ModelJudge], Awaitable[None]]


def using(
    server: JudgeServer,
    pairs: int,
    awaited: dict[int, set[int]] | None,
    work: Work,
    path: Path | None = None,
    **changed: Any,
) -> None:
    rubric: dict[str, Item | str] = {"large": "Which is larger?", "nice": Item(ask="Which is nicer?", weight=2.0)}
    asked = Judge(url=server.url, model="m", rubric=rubric, pairs=pairs, backoff_s=0.01, timeout_s=5.0)
    asked = msgspec.structs.replace(asked, **changed)

    async def run() -> None:
        judge, buffer = ModelJudge(asked, path), Buffer(awaited)
        comparing = PairJudge(judge, pairs, buffer.missing, buffer.deliver)
        try:
            async with asyncio.timeout(30):
                await work(comparing, buffer, judge)
        finally:
            await comparing.close()
            await judge.close()

    asyncio.run(run())


def large(verdicts: dict[int, Verdict]) -> dict[int, float]:
    return {sample: verdict["large"] for sample, verdict in verdicts.items() if not isinstance(verdict, RewardFailure)}


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110  (nothing tells of it)
        await asyncio.sleep(0.01)


# -- who with whom ---------------------------------------------------------------------------------------------------


def test_the_ring_by_hand() -> None:
    assert [opponents(sample, range(6), 2) for sample in range(6)] == [[1, 5], [0, 2], [1, 3], [2, 4], [3, 5], [0, 4]]
    assert opponents(0, range(8), 4) == [1, 2, 6, 7]
    assert opponents(2, [0, 5, 7], 2) == [0, 5], "samples that never came leave no gap"
    assert opponents(1, range(4), 3) == [0, 2, 3]
    assert opponents(1, [], 2) == []


@given(st.sets(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 20))
def test_all_have_as_many_and_each_pair_counts_for_both(members: set[int], half: int) -> None:
    found = {sample: opponents(sample, members, 2 * half) for sample in members}
    for sample, others in found.items():
        assert len(set(others)) == len(others) == min(2 * half, len(members) - 1)
        assert sample not in others
        assert members.issuperset(others)
        assert all(sample in found[other] for other in others)


# -- what they get ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (1, 0, 4, 3, 2)])
def test_shares_of_wins_by_hand_in_any_order(order: Sequence[int]) -> None:
    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        for sample in order:
            comparing.park([parked(sample, (5, 10, 15, 20, 25)[sample])])
            await asyncio.sleep(0.01)
        # Of 5, 15 and 25, and of 10 and 20, none is nicer: half a win.
        assert await buffer.until(5) == {
            0: {"large": 0.0, "nice": 0.25},
            1: {"large": 0.25, "nice": 0.375},
            2: {"large": 0.5, "nice": 0.5},
            3: {"large": 0.75, "nice": 0.625},
            4: {"large": 1.0, "nice": 0.75},
        }
        assert (judge.stats.compared, judge.stats.by_place) == (10, 0)

    with judge_server(larger) as server:
        using(server, 4, {0: {0, 1, 2, 3, 4}}, work)
    assert server.calls.total() == 20, "each pair in both orders, and once"
    assert len(set(server.asked)) == 20


def test_two_neighbors_cost_two_calls_a_completion() -> None:
    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(sample) for sample in range(6)])
        assert large(await buffer.until(6)) == {0: 0.0, 1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5, 5: 1.0}

    with judge_server(larger) as server:
        using(server, 2, {0: set(range(6))}, work, cache_bytes=0)
    assert server.calls.total() == 12, "also without a cache"


def test_a_preference_for_a_place_is_no_advantage_and_is_told() -> None:
    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(sample) for sample in range(4)])
        assert list((await buffer.until(4)).values()) == [{"large": 0.5, "nice": 0.5}] * 4
        assert judge.stats.by_place == judge.stats.compared == 6

    with judge_server(lambda _: "large: first\nnice: The first one.") as server:
        using(server, 3, {0: set(range(4))}, work)


def test_the_same_text_is_a_tie_that_nobody_is_asked_about() -> None:
    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(0, 7), parked(1, 7), parked(2, 9)])
        assert large(await buffer.until(3)) == {0: 0.25, 1: 0.25, 2: 1.0}
        assert (judge.stats.cache_hits, judge.stats.compared) == (2, 2), "each of the same two against the third"

    with judge_server(larger) as server:
        using(server, 2, {0: {0, 1, 2}}, work)
    assert server.calls.total() == 2


@settings(max_examples=20)  # each opens a client
@given(st.lists(st.integers(0, 30), min_size=2, max_size=7), st.integers(0, 1 << 30))
def test_a_group_has_half_of_all_wins(numbers: list[int], seed: int) -> None:
    """Whatever the judge says, in whatever order: the mean reward of a group is known before."""
    random = Random(seed)

    class Arbitrary(ModelJudge):
        async def verdict(self, given: Asked) -> Verdict:
            return {"large": random.choice((0.0, 0.5, 1.0))}

    async def work() -> None:
        judge = Arbitrary(Judge(url="http://nowhere", model="m", rubric={"large": "?"}, pairs=2))
        buffer = Buffer({0: set(range(len(numbers)))})
        comparing = PairJudge(judge, 2, buffer.missing, buffer.deliver)
        order = list(enumerate(numbers))
        random.shuffle(order)
        for sample, number in order:
            comparing.park([parked(sample, number)])
        shares = large(await buffer.until(len(numbers)))
        assert sum(shares.values()) == pytest.approx(len(numbers) / 2)
        await comparing.close()
        await judge.close()

    asyncio.run(work())


# -- who does not come -----------------------------------------------------------------------------------------------


def test_a_completion_waits_for_those_that_it_is_compared_with_and_no_others() -> None:
    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(0), parked(1), parked(5)])
        assert large(await buffer.until(1)) == {0: 0.0}
        assert [each.slot.sample for each in comparing.waiting] == [1, 5]
        assert sorted(comparing.parked([0, 3])) == [Slot(0, 0), Slot(0, 1), Slot(0, 5)]
        comparing.park([parked(sample) for sample in (2, 3, 4)])
        assert len(await buffer.until(6)) == 6

    with judge_server(larger) as server:
        using(server, 2, {0: set(range(6))}, work)


def test_one_that_never_comes_leaves_the_ring() -> None:
    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(sample) for sample in (0, 1, 3, 4, 5)])
        assert large(await buffer.until(3)) == {0: 0.0, 4: 0.5, 5: 1.0}
        assert buffer.awaited is not None
        buffer.awaited[0].discard(2)  # its engine had an error, for example
        assert large(await buffer.until(5)) == {0: 0.0, 1: 0.5, 3: 0.5, 4: 0.5, 5: 1.0}

    with judge_server(larger) as server:
        using(server, 2, {0: set(range(6))}, work)


def test_the_last_of_its_group_has_nobody_to_be_compared_with() -> None:
    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(3)])
        (verdict,) = (await buffer.until(1)).values()
        assert isinstance(verdict, RewardFailure)
        assert verdict.reason == DropReason.GROUP_INCOMPLETE
        assert judge.stats.failures == 0, "the judge has nothing to do with it"

    with judge_server(larger) as server:
        using(server, 2, {0: {3}}, work)
    assert not server.bodies


def test_what_is_parked_of_a_group_that_has_ended_goes(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"

    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(0), parked(0, group=7)])
        assert buffer.awaited is not None
        await buffer.until(1)
        assert buffer.delivered == [Delivered(Slot(7, 0), ENDED)]
        await until(lambda: not comparing.parked([7]))
        assert judge.store.parked() == [(Slot(0, 0), RewardInput("p", "0", "a"))]

    with judge_server(larger) as server:
        using(server, 2, {0: {0, 1, 2}, 7: set()}, work, path)


def test_two_that_cannot_be_compared_fail_and_the_others_go_on() -> None:
    """Counted by completion; the pair is asked about as often as any other call."""

    def answer(text: str) -> str:
        return "hm" if set(shown(text)) == {"1", "2"} else larger(text)

    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(sample) for sample in range(6)])
        verdicts = await buffer.until(6)
        assert large(verdicts) == {0: 0.0, 3: 0.5, 4: 0.5, 5: 1.0}
        for failure in (verdicts[1], verdicts[2]):
            assert isinstance(failure, RewardFailure)
            assert failure.reason == DropReason.JUDGE_INVALID
            assert failure.message.endswith("'hm'; after 1 retries")
        assert judge.stats.failures == 2
        (first,) = judge.record.first
        assert first.arguments.keys() == {"prompt", "first", "second", "answer"}
        assert {first.arguments["first"], first.arguments["second"]} == {"'1'", "'2'"}

    with judge_server(answer) as server:
        using(server, 2, {0: set(range(6))}, work, retries=1)
    assert server.calls.total() == 5 * 2 + 2 * 2


def test_a_budget_that_is_used_up_drops_what_it_cannot_compare() -> None:
    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(sample) for sample in range(3)])
        verdicts = await buffer.until(3)
        reasons = [each.reason for each in verdicts.values() if isinstance(each, RewardFailure)]
        assert reasons
        assert set(reasons) == {DropReason.JUDGE_BUDGET}
        assert judge.always.startswith("reward.judge.max_calls=3 is used up (3 calls with 300 tokens)")

    with judge_server(larger) as server:
        using(server, 2, {0: {0, 1, 2}}, work, max_calls=3, concurrency=1)
    assert server.calls.total() == 3


# -- processes that die ----------------------------------------------------------------------------------------------


def test_what_was_parked_is_gone_on_with_and_nothing_is_asked_twice(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"

    async def first(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        comparing.park([parked(0), parked(1), parked(5)])
        comparing.park([parked(1, "another")])  # a call that is repeated changes nothing
        await buffer.until(1)

    async def second(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        assert sorted(comparing.parked([0])) == [Slot(0, 0), Slot(0, 1), Slot(0, 5)]
        await asyncio.sleep(0.1)
        assert not buffer.delivered, "as long as recorded deliveries are repeated, nobody knows what is missing"
        buffer.awaited = {0: {1, 2, 3, 4, 5}}
        comparing.park([parked(sample) for sample in (2, 3, 4)])
        verdicts = await buffer.until(6)
        # The one that had been delivered is only compared with; to deliver it again is the buffer's to refuse.
        assert verdicts.pop(0) == ENDED
        assert large(verdicts) == {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5, 5: 1.0}
        await until(lambda: not comparing.parked([0]))

    with judge_server(larger) as server:
        using(server, 2, {0: set(range(6))}, first, path)
        assert server.calls.total() == 4
        using(server, 2, None, second, path)
        assert server.calls.total() == 12
    store = VerdictStore(path, 1 << 20)
    assert store.parked() == []
    store.close()


def test_a_delivery_that_fails_is_raised_to_whoever_asks_next() -> None:
    async def work(comparing: PairJudge, buffer: Buffer, judge: ModelJudge) -> None:
        async def full(parked: Parked, verdict: Verdict, waited_s: float) -> None:
            raise OSError("no space left")

        own = PairJudge(judge, 2, buffer.missing, full)
        own.check()
        own.park([parked(0), parked(1)])
        await until(lambda: not own.waiting)
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="no space left"):
            own.park([parked(2)])
        await own.close()

    with judge_server(larger) as server:
        using(server, 2, {0: {0, 1}}, work)
