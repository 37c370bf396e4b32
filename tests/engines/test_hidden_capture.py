"""Hidden states that an engine gives away while it decodes: those of its own steps, whatever drafts and updates."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config.drafter import DrafterTraining, Strategy
from asyncrl.config.engine import NativeEngine as NativeSettings
from asyncrl.drafting.heads import HeadConfig, default_taps
from asyncrl.drafting.hidden_capture import Budget, Part, RolloutTap, Tapped
from asyncrl.drafting.reading import read_windows
from asyncrl.drafting.windows import Window
from asyncrl.engines.base import OnUpdate
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.cuda.pages import PAGE
from asyncrl.engines.native.speculation.source import Chooser
from asyncrl.models.checkpoint import load_model
from asyncrl.models.config import read_config
from asyncrl.types import Request, Segment, Slot, Trajectory
from tests.support import needs
from tests.support.drafters import Switching, drafter, save_heads
from tests.support.driving import LONG, ask, collect, collect_all, publishing, serving, until_generated
from tests.support.tiny_model import tiny_checkpoint

KINDS = ("none", "eagle", "eagle3", "tree")
CHAINS = ("none", "eagle", "eagle3")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU)]
EVERYWHERE = [
    *(("native", kind) for kind in KINDS),
    *(pytest.param("paged", kind, marks=pytest.mark.slow if kind == "eagle" else ()) for kind in CHAINS),
    *(pytest.param("cuda", kind, marks=ON_GPU) for kind in CHAINS),
]
TappedEngine = NativeEngine | CudaEngine


def make(
    folder: Path,
    kind: str,
    *,
    on: str = "native",
    training: DrafterTraining | None = None,
    chooser: Chooser | None = None,
    pages: int | None = None,
    **engine: Any,
) -> TappedEngine:
    """An engine with a random target, and with random heads where it drafts."""
    tiny_checkpoint(folder / "target")
    save_heads(folder / "target", folder)
    config = read_config(folder / "target")
    layers = () if kind == "eagle" else default_taps(config.layers)
    training = training or DrafterTraining(tokens_per_step=100_000)
    tap = RolloutTap(training, layers, config.hidden_size, tokens=training.tokens_per_step, seed=0, dtype=torch.float32)
    settings = None if kind == "none" else drafter(kind, folder)
    if on == "native":
        return NativeEngine(folder / "target", NativeSettings(**engine), settings, name="native", tap=tap)
    return CudaEngine(
        folder / "target",
        NativeSettings(graph_memory_gib=0.25, **engine),
        settings,
        name=on,
        device=torch.device("cpu" if on == "paged" else on),
        tap=tap,
        chooser=chooser,
        pages=pages,
    )


def tap_of(engine: TappedEngine) -> RolloutTap:
    tap = engine._tap  # pyright: ignore[reportPrivateUsage]
    assert tap is not None
    return tap


def trajectory(request: Request, segments: list[Segment], group: int = 0) -> Trajectory:
    return Trajectory(
        slot=Slot(group, 0),
        prompt="p",
        segments=(Segment.given(request.tokens), *segments),
        reward=0.0,
        finish="stop",
        started=0.0,
        finished=1.0,
        engine="native",
    )


async def tapped_answers(engine: TappedEngine, requests: list[Request]) -> list[tuple[Trajectory, list[Window]]]:
    for request in requests:
        tap_of(engine).offer(request.id, len(request.tokens) + request.sampling.max_tokens)
    answers = await collect_all(engine, requests)
    found = [trajectory(request, answers[group].segments, group) for group, request in enumerate(requests)]
    return [(each, tap_of(engine).end(request.id, each)) for request, each in zip(requests, found, strict=True)]


def expected(folder: Path, kind: str, wanted: Trajectory, longest: int = 512) -> Window:
    """By one forward over the whole text."""
    model, config = load_model(folder / "target")
    taps = () if kind == "eagle" else default_taps(config.layers)
    head = HeadConfig(kind="eagle3" if taps else "eagle", target=config, taps=taps, vocabulary=config.vocabulary)
    return next(iter(read_windows(model, head, [wanted], longest=longest)))


def assert_same(found: Window, whole: Window, on: str = "native") -> None:
    """The window is the same as the end of another, up to the order of sums on this device."""
    skipped = found.start - whole.start
    assert skipped >= 0
    assert found.tokens_T.tolist() == whole.tokens_T[skipped:].tolist()
    assert found.sampled_T.tolist() == whole.sampled_T[skipped:].tolist()
    assert (found.slot, found.answer_length) == (whole.slot, whole.answer_length)
    _close(found.hidden_T_E, whole.hidden_T_E[skipped:], on)
    assert (found.taps_T_R is None) == (whole.taps_T_R is None)
    if found.taps_T_R is not None and whole.taps_T_R is not None:
        _close(found.taps_T_R, whole.taps_T_R[skipped:], on)


def _close(one: Tensor, other: Tensor, on: str) -> None:
    torch.testing.assert_close(one, other, atol=2e-4 if on == "cuda" else 1e-5, rtol=1e-4)


@pytest.mark.parametrize(("on", "kind"), EVERYWHERE)
def test_windows_are_those_of_a_forward_over_the_text(on: str, kind: str, tmp_path: Path) -> None:
    """Prompts in several chunks, of which two are shared, more answers than rows, drafts accepted and not."""
    requests = [ask(f"long-{seed}", LONG, seed=seed, max_tokens=20) for seed in range(2)]
    requests += [ask(f"short-{seed}", seed=seed, max_tokens=4 + 9 * seed) for seed in range(4)]
    requests += [ask("resumed", LONG[:40], seed=7, resumed=5, max_tokens=30)]

    async def scene() -> list[tuple[Trajectory, list[Window]]]:
        async with serving(engine := make(tmp_path, kind, on=on, max_batch=5, prefill_chunk=64)):
            return await tapped_answers(engine, requests)

    for (done, windows), request in zip(asyncio.run(scene()), requests, strict=True):
        (window,) = windows
        assert window.version == 0
        assert_same(window, expected(tmp_path, kind, done), on)
        whole = [] if on != "native" else [0]
        assert window.start in (*whole, len(request.tokens) - 1), "from the beginning, or from the end of a prompt"
        if whole and request.id.startswith("long"):
            assert window.start == 0, "whoever waits for a prompt that another computes gets its states"


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
@pytest.mark.parametrize("kind", ["none", "eagle3"])
@pytest.mark.parametrize("on", ["native", "paged", pytest.param("cuda", marks=ON_GPU)])
def test_no_window_has_states_of_two_versions(on: str, kind: str, on_update: OnUpdate, tmp_path: Path) -> None:
    request = ask("a", max_tokens=40)

    async def scene() -> tuple[Trajectory, list[Window]]:
        async with serving(engine := make(tmp_path, kind, on=on)):
            tap_of(engine).offer("a", 47)
            answering = asyncio.create_task(collect(engine, request))
            await until_generated(engine, 15)
            tiny_checkpoint(tmp_path / "other", seed=1)
            with publishing(tmp_path / "other") as publish:
                await engine.load_weights(publish(1), on_update)
                done = trajectory(request, (await answering).segments)
            return done, tap_of(engine).end("a", done)

    done, windows = asyncio.run(scene())
    last = windows[-1]
    assert last.version == 1
    assert last.start + len(last) == len(done.tokens) - 1
    if on_update == "recompute" and on == "native":
        (window,) = windows
        tiny_checkpoint(tmp_path / "target", seed=1)
        assert_same(window, expected(tmp_path, kind, done), on)
        return
    first, second = windows
    begin = 0 if on == "native" else len(request.tokens) - 1
    assert (first.version, first.start, first.start + len(first)) == (0, begin, second.start)
    # What the first version has not sampled is not among its states: the last of its tokens was read by the second.
    assert second.start == int((done.versions <= 0).sum()) - 1
    whole = expected(tmp_path, kind, done)
    _close(first.hidden_T_E, whole.hidden_T_E[begin : second.start], on)
    assert not torch.allclose(second.hidden_T_E, whole.hidden_T_E[second.start :], atol=1e-2)
    if on_update == "recompute":
        tiny_checkpoint(tmp_path / "target", seed=1)
        assert_same(second, expected(tmp_path, kind, done), on)


@pytest.mark.parametrize(
    "on", ["native", pytest.param("paged", marks=pytest.mark.slow), pytest.param("cuda", marks=ON_GPU)]
)
def test_the_last_tokens_of_a_long_answer_are_kept(on: str, tmp_path: Path) -> None:
    training = DrafterTraining(tokens_per_step=10_000, window_tokens=16)

    async def scene() -> list[tuple[Trajectory, list[Window]]]:
        async with serving(engine := make(tmp_path, "eagle3", on=on, training=training)):
            return await tapped_answers(engine, [ask("a", max_tokens=60), ask("b", LONG, max_tokens=33)])

    for done, windows in asyncio.run(scene()):
        (window,) = windows
        assert len(window) == 16
        assert_same(window, expected(tmp_path, "eagle3", done, longest=16), on)


def test_answers_are_the_same_with_a_tap_and_only_chosen_ones_are_kept(tmp_path: Path) -> None:
    requests = [ask(str(seed), seed=seed, max_tokens=12) for seed in range(8)]
    answers: list[list[list[int]]] = []
    for budget in (1, 100_000):

        async def scene(budget: int = budget) -> list[tuple[Trajectory, list[Window]]]:
            training = DrafterTraining(tokens_per_step=budget)
            async with serving(engine := make(tmp_path, "eagle3", training=training)):
                found = await tapped_answers(engine, requests)
                assert not tap_of(engine).tapped
                return found

        found = asyncio.run(scene())
        assert sum(len(windows) for _, windows in found) == (1 if budget == 1 else 8)
        answers.append([done.tokens.tolist() for done, _ in found])
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("on", ["paged", pytest.param("cuda", marks=ON_GPU)])
def test_rows_that_move_wait_and_change_their_strategy(on: str, tmp_path: Path) -> None:
    """Pages are short, so rows are computed again; plain steps, of which the host is one behind, and others in turn."""
    lengths = [120, 100, 90, 3, 110, 1, 80]
    requests = [ask(f"{i}", LONG[: 1 + 17 * (i % 4)], max_tokens=length, seed=i) for i, length in enumerate(lengths)]
    chooser = Switching((Strategy(depth=4), Strategy(depth=0), Strategy(depth=2)), steps=20)
    sizes: dict[str, Any] = {"pages": 5, "max_batch": 6, "max_length": 4 * PAGE, "prefill_chunk": 48}

    async def scene() -> list[tuple[Trajectory, list[Window]]]:
        async with serving(engine := make(tmp_path, "eagle3", on=on, chooser=chooser, **sizes)):
            found = await tapped_answers(engine, requests)
            assert engine.stats().prefilled_tokens > sum(len(request.tokens) for request in requests)
            return found

    for done, windows in asyncio.run(scene()):
        if done.sampled_tokens < 2:
            assert not windows
            continue
        (window,) = windows
        assert len(window) == done.sampled_tokens
        assert_same(window, expected(tmp_path, "eagle3", done), on)


def test_where_no_places_are_left_completions_are_not_tapped(tmp_path: Path) -> None:
    """All are promised, and there are places for a few at a time; each place comes back."""
    training = DrafterTraining(tokens_per_step=8, window_tokens=32)
    requests = [ask(str(seed), seed=seed, max_tokens=30) for seed in range(10)]

    async def scene() -> None:
        async with serving(engine := make(tmp_path, "eagle3", on="paged", training=training, max_batch=5)):
            tap = tap_of(engine)
            tap._budget = Budget(100_000, 32, seed=0)  # pyright: ignore[reportPrivateUsage]
            found = await tapped_answers(engine, requests)
            given = [windows for _, windows in found if windows]
            assert 1 < len(given) < len(requests)
            for done, windows in found:
                for window in windows:
                    assert_same(window, expected(tmp_path, "eagle3", done))
            (again,) = await tapped_answers(engine, [ask("again", seed=99, max_tokens=30)])
            assert again[1]

    asyncio.run(scene())


def test_parts_by_hand() -> None:
    """What comes again replaces what was there; stretches end where the version changes or tokens are missing."""
    tapped = Tapped(longest=6, promised=6)
    for version, start, length in [(0, 0, 3), (0, 3, 1), (0, 4, 2), (0, 5, 2), (1, 7, 2), (1, 10, 1)]:
        states = 100 * version + torch.arange(start, start + length)[:, None].float()
        tapped.add(Part(version, start, states))
    runs = [(run.version, run.start, run.states_T_X[:, 0].int().tolist()) for run in tapped.runs()]
    assert runs == [(0, 5, [5, 6]), (1, 7, [107, 108]), (1, 10, [110])]
    tapped.add(Part(2, 0, torch.zeros(1, 1)))
    assert [(run.version, run.start) for run in tapped.runs()] == [(2, 0)]


def test_a_step_gives_no_more_than_its_budget_and_answers_have_the_same_chance() -> None:
    """Short answers, which end first, and long ones, a hundred in each step, all begun together."""
    training, budget = DrafterTraining(window_tokens=64), 600
    tap = RolloutTap(training, (), 1, tokens=budget, seed=0, dtype=torch.float32)
    long = given = 0
    for version in range(1, 41):
        tap.begin_step(version)
        requests = [(f"{version}/{number}", 10 if number % 2 else 50) for number in range(100)]
        tokens = 0
        for batch in range(0, 100, 10):
            for name, _ in requests[batch : batch + 10]:
                tap.offer(name, 60)
            for name, length in requests[batch : batch + 10]:
                if (tapped := tap.tapped.get(name)) is not None:
                    tapped.add(Part(version, 0, torch.zeros(length - 1, 1)))
                sampled = Segment.sampled(np.zeros(length - 1, np.int32), np.zeros(length - 1), version)
                found = tap.end(name, trajectory(ask(name, (1,)), [sampled]))
                tokens += sum(map(len, found))
                if version > 1:
                    given += len(found)
                    long += sum(window.answer_length == 49 for window in found)
        assert tokens < budget + 60, "at most one answer beyond it"
        if version > 1:
            assert tokens > budget / 2
    assert 0.4 < long / given < 0.6
