"""Pages of the KV cache: no page is lost, none has two writers, and an engine with too few of them still serves all."""

import asyncio
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.base import Engine
from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.cuda.inputs import Sizes, StepInputs
from asyncrl.engines.native.cuda.pages import PAGE, Copy, PageTable
from asyncrl.engines.native.cuda.planner import Planner
from asyncrl.engines.native.cuda.timeline import Timeline
from tests.support.driving import LONG, Answer, ask, collect_all, native, publishing, serving
from tests.support.tiny_model import tiny_checkpoint

ROWS, LENGTH, SIZE, PAGES = 5, 40, 8, 14


class Pages(RuleBasedStateMachine):
    """Every token is a number that is written once; what a row reads must be what was written for it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(ROWS, LENGTH, PAGES, SIZE)
        self.memory = np.zeros((PAGES, SIZE), np.int64)
        self.texts: list[list[int]] = [[] for _ in range(ROWS)]
        self.next = 1
        self.remembered: list[list[int]] = []

    @rule(row=st.integers(0, ROWS - 1), count=st.integers(1, 12))
    def write(self, row: int, count: int) -> None:
        text, free, held = self.texts[row], self.table.free, int(self.table.held[row])
        end = min(LENGTH, len(text) + count)
        if not self.table.reserve(row, end):
            assert -(-end // SIZE) - held > free
            assert (self.table.free, self.table.held[row]) == (free, held), "nothing has changed"
            return
        for position in range(len(text), end):
            self.memory[self.table.table[row, position // SIZE], position % SIZE] = self.next
            text.append(self.next)
            self.next += 1

    @rule(source=st.integers(0, ROWS - 1), to=st.integers(0, ROWS - 1), length=st.integers(1, LENGTH))
    def share(self, source: int, to: int, length: int) -> None:
        if source == to or self.table.held[to] or length > len(self.texts[source]):
            return
        copies = self.table.share(source, to, length)
        if copies is None:
            assert self.table.free == 0
            assert self.table.held[to] == 0
            return
        for copy in copies:
            self.memory[copy.target] = self.memory[copy.source]
        self.texts[to] = self.texts[source][:length]

    @rule(row=st.integers(0, ROWS - 1), count=st.integers(0, LENGTH))
    def remember(self, row: int, count: int) -> None:
        text = self.texts[row][:count]
        self.table.remember(row, np.array(text, np.int64))
        self.remembered.append(text)

    @rule(row=st.integers(0, ROWS - 1), number=st.integers(0, 99), more=st.integers(0, SIZE))
    def find(self, row: int, number: int, more: int) -> None:
        if self.table.held[row] or not self.remembered:
            return
        text = self.remembered[number % len(self.remembered)]
        found = self.table.find(row, np.array(text + [-1] * more, np.int64))
        assert found <= len(text)
        assert found == self.table.held[row] * SIZE
        self.texts[row] = text[:found]

    @rule()
    def forget(self) -> None:
        self.table.forget()

    @rule(row=st.integers(0, ROWS - 1))
    def release(self, row: int) -> None:
        self.table.release(row)
        self.texts[row] = []

    @rule(source=st.integers(0, ROWS - 1), to=st.integers(0, ROWS - 1))
    def move(self, source: int, to: int) -> None:
        if source != to and not self.table.held[to]:
            self.table.move(source, to)
            self.texts[to], self.texts[source] = self.texts[source], []

    @invariant()
    def every_row_reads_its_own(self) -> None:
        for row, text in enumerate(self.texts):
            read = self.memory[self.table.table[row, : self.table.held[row]]].ravel()
            assert read[: len(text)].tolist() == text

    @invariant()
    def no_page_is_lost(self) -> None:
        held = {int(page) for row in range(ROWS) for page in self.table.table[row, : self.table.held[row]]}
        assert len(held) + self.table.free == PAGES


Pages.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPages = Pages.TestCase


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory)
    return directory


@pytest.mark.parametrize("pages", [5, 100])
def test_an_engine_short_of_pages_serves_all_alike(path: Path, pages: int) -> None:
    """Rows that give up their pages are computed again, and nothing of it can be seen in the answers."""
    lengths = [120, 30, 100, 3, 90, 60, 110, 1, 70, 80]
    requests = [
        ask(f"{i}", LONG[: 1 + 17 * (i % 4)], seed=i, max_tokens=length, temperature=float(i % 5 != 0))
        for i, length in enumerate(lengths)
    ]
    few = Settings(max_batch=6, max_length=4 * PAGE, prefill_chunk=48)
    paged = CudaEngine(path, few, name="paged", device=torch.device("cpu"), pages=pages)

    async def run(engine: Engine) -> list[Answer]:
        async with serving(engine) as serves:
            return await collect_all(serves, requests)

    answers = asyncio.run(run(paged))
    expected = asyncio.run(run(native(path)))
    for answer, reference in zip(answers, expected, strict=True):
        assert answer.tokens.tolist() == reference.tokens.tolist()
        np.testing.assert_allclose(answer.logprobs, reference.logprobs, atol=1e-3)
    assert paged.stats().generated_tokens == sum(lengths)
    computed_twice = paged.stats().prefilled_tokens > sum(len(request.tokens) for request in requests)
    assert computed_twice == (pages == 5)


def test_a_group_shares_its_prompt(path: Path) -> None:
    prompt = LONG[: PAGE + 20]
    requests = [ask(f"{i}", prompt, seed=i, max_tokens=5) for i in range(8)]

    async def run() -> int:
        paged = CudaEngine(path, Settings(), name="paged", device=torch.device("cpu"))
        async with serving(paged) as engine:
            answers = await collect_all(engine, requests)
            assert len({answer.tokens.tobytes() for answer in answers}) > 5
            return engine.stats().prefilled_tokens

    assert asyncio.run(run()) == len(prompt) - 1


def test_rows_are_computed_again_when_one_that_lagged_has_just_ended() -> None:
    """An answer may end in the step that computed its prompt, and weights may change before the next one is planned."""
    waiting = deque(Job(ask(name, LONG[:count])) for name, count in (("short", 3), ("long", 9)))
    short, long = waiting
    slots, copies = BatchTable(2, 4 * PAGE), list[Copy]()
    planner = Planner(slots, PageTable(2, 4 * PAGE, 8), waiting, copies.extend, tiles=4, tile=16)
    fields = StepInputs(Sizes(2, 1, 4, 4, 16), Timeline(torch.device("cpu"))).next()
    planner.admit()
    assert planner.prefill(fields) == 2
    planner.release(short)
    assert planner.recompute() == 8
    assert planner.prefill(fields) == 1
    assert (short.row, long.row, slots.computed[0]) == (-1, 0, 8)


def _planner(waiting: deque[Job], rows: int) -> Planner:
    return Planner(BatchTable(rows, 4 * PAGE), PageTable(rows, 4 * PAGE, 8 * rows), waiting, _ignore, tiles=1, tile=16)


def _ignore(_: list[Copy]) -> None: ...


def test_rows_that_wait_for_a_prompt_go_on_sharing_it_after_an_update() -> None:
    """The first has begun under the old weights and stays alone; of the others one computes the prompt for all."""
    waiting = deque(Job(ask(f"{i}", LONG[:40], seed=i)) for i in range(4))
    first, second, third, fourth = waiting
    planner = _planner(waiting, 4)
    fields = StepInputs(Sizes(4, 1, 4, 1, 16), Timeline(torch.device("cpu"))).next()
    planner.admit()
    assert planner.prefill(fields) == 1
    planner.forget_prompts()
    assert [job.leader for job in (first, second, third, fourth)] == [None, second, second, second]
    tiles = 0
    while used := planner.prefill(fields):
        tiles += used
    assert tiles == 2 + 3, "39 tokens are three tiles; the first row had one of them"


def test_a_request_ahead_of_all_is_computed_before_those_that_lag() -> None:
    waiting = deque(Job(ask(f"{i}", LONG[i : i + 40])) for i in range(2))
    planner = _planner(waiting, 4)
    fields = StepInputs(Sizes(4, 1, 4, 1, 16), Timeline(torch.device("cpu"))).next()
    planner.admit()
    planner.prefill(fields)
    probe = Job(msgspec.structs.replace(ask("probe", LONG[:8]), ahead=True))
    waiting.appendleft(probe)
    planner.admit()
    planner.prefill(fields)
    assert fields.tile_row_J[0] == probe.row


def test_an_update_in_the_middle_of_a_prompt_leaves_a_group_whole(path: Path, tmp_path: Path) -> None:
    """Rows that had nothing before the update answer as if the new weights had always been there."""
    other = tmp_path / "other"
    tiny_checkpoint(other, seed=1)
    requests = [ask(f"{i}", LONG[: PAGE + 20], seed=i, max_tokens=5) for i in range(6)]

    def engine(model: Path) -> CudaEngine:
        few = Settings(max_batch=8, max_length=4 * PAGE, prefill_chunk=16)
        return CudaEngine(model, few, name="paged", device=torch.device("cpu"))

    async def expected() -> list[Answer]:
        async with serving(engine(other)) as fresh:
            return await collect_all(fresh, requests)

    async def updated() -> tuple[list[Answer], int]:
        with publishing(other) as publish:
            manifest = publish(1)
            async with serving(engine(path)) as updates:
                answering = asyncio.create_task(collect_all(updates, requests))
                while not updates.stats().prefilled_tokens:  # noqa: ASYNC110  (it is counted in this very loop)
                    await asyncio.sleep(0)
                await updates.pause()
                begun = updates.stats()
                assert begun.generated_tokens == 0
                assert begun.prefilled_tokens < PAGE
                await updates.load_weights(manifest, "keep")
                await updates.resume()
                return await answering, updates.stats().prefilled_tokens

    answers, prefilled = asyncio.run(updated())
    for answer, reference in list(zip(answers, asyncio.run(expected()), strict=True))[1:]:
        assert answer.versions == [1]
        assert answer.tokens.tolist() == reference.tokens.tolist()
        np.testing.assert_allclose(answer.logprobs, reference.logprobs, atol=1e-4)
    assert prefilled == 2 * (PAGE + 19), "once for the row that had begun, once for the five others"
