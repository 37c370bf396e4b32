"""What every engine promises, whatever is inside."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from asyncrl.engines.base import OnUpdate
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.types import Fp8Version, WeightManifest
from tests.support import needs
from tests.support.drafters import DRAFTERS, GUESSING, drafting, paged_drafting, save_heads
from tests.support.driving import (
    LONG,
    PROMPT,
    Answer,
    Driver,
    ask,
    child_processes,
    collect,
    collect_all,
    cuda,
    fake,
    native,
    paged,
    publishing,
    transformers,
    until_generated,
)
from tests.support.parity import behaviour, gathered, processed, reference_logits
from tests.support.real_vllm import SharedVllm, needs_vllm
from tests.support.tiny_model import tiny_checkpoint

Publish = Callable[[int], WeightManifest]
pytestmark = pytest.mark.timeout(300)
EXACT = 1e-3
"""Largest difference of fp32 log-probabilities."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def family() -> str:
    return "qwen3"


def _checkpoint(directory: Path, family: str, seed: int = 0) -> PreTrainedModel:
    """Its output matrix is the embedding, as in most small models: what is made of it must follow an update."""
    return tiny_checkpoint(directory, family, seed=seed, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def reference(path: Path, family: str) -> PreTrainedModel:
    return _checkpoint(path, family)


@pytest.fixture(scope="module")
def heads(path: Path, reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    save_heads(path, folder)
    return folder


@pytest.fixture(scope="module")
def shared_vllm(path: Path, reference: PreTrainedModel) -> Iterator[SharedVllm]:
    driver = SharedVllm(path)
    yield driver
    driver.close()


def driver_for(request: pytest.FixtureRequest, path: Path) -> Driver:
    if request.param == "vllm":
        return request.getfixturevalue("shared_vllm")
    if request.param in DRAFTERS:
        make = drafting(request.param, request.getfixturevalue("heads"))
        return Driver(make, path, redrafts=request.param not in GUESSING)
    where, _, kind = request.param.partition("_")
    if kind:
        make = paged_drafting(kind, request.getfixturevalue("heads"), "cpu" if where == "paged" else where)
        return Driver(make, path, redrafts=kind not in GUESSING)
    plain = {"native": native, "paged": paged, "cuda": cuda, "transformers": transformers, "fake": fake}
    return Driver(plain[request.param], path)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU)]
NATIVE = ["native", "paged", pytest.param("cuda", marks=ON_GPU)]
TRANSFORMERS = pytest.param("transformers", marks=pytest.mark.slow)
VLLM = pytest.param("vllm", marks=needs_vllm)
WITH_DRAFTER = [
    *(pytest.param(kind, marks=pytest.mark.slow if kind in ("eagle", "tree") else ()) for kind in DRAFTERS),
    *(pytest.param(f"paged_{kind}", marks=pytest.mark.slow) for kind in ("eagle", "eagle3", "ngram")),
    *(pytest.param(f"cuda_{kind}", marks=ON_GPU) for kind in ("eagle", "eagle3", "ngram")),
]


@pytest.fixture(params=[*NATIVE, TRANSFORMERS, "fake", VLLM, *WITH_DRAFTER])
def drive(request: pytest.FixtureRequest, path: Path, reference: PreTrainedModel) -> Driver:
    return driver_for(request, path)


@pytest.fixture(params=[*NATIVE, TRANSFORMERS, VLLM, *WITH_DRAFTER])
def with_model(request: pytest.FixtureRequest, path: Path, reference: PreTrainedModel) -> Driver:
    """Engines whose tokens come from a model."""
    return driver_for(request, path)


def test_answers_are_fixed_by_their_seed_not_by_their_company(drive: Driver, path: Path) -> None:
    requests = [ask(f"r{i}", PROMPT[: 2 + i % 5], seed=i, max_tokens=5 + 7 * (i % 4)) for i in range(24)]

    async def together(max_batch: int) -> list[Answer]:
        async with drive.engine(max_batch=max_batch, prefill_chunk=3 + max_batch) as engine:
            return await collect_all(engine, requests)

    async def alone() -> list[Answer]:
        async with drive.engine() as engine:
            return [await collect(engine, request) for request in requests]

    reference = drive.run(alone())
    assert len({answer.tokens.tobytes() for answer in reference}) > 20
    for max_batch in drive.batch_sizes:
        for answer, expected in zip(drive.run(together(max_batch)), reference, strict=True):
            assert answer.tokens.tolist() == expected.tokens.tolist()
            np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=EXACT)
            assert answer.finish == expected.finish


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_each_update_opens_a_segment(drive: Driver, path: Path, on_update: OnUpdate) -> None:
    async def scenario(publish: Publish) -> None:
        async with drive.engine() as engine:
            began = engine.stats()
            running = asyncio.create_task(collect(engine, ask("a", max_tokens=240)))
            wanted = [began.version + step for step in range(4)]
            for step, version in enumerate(wanted[1:], start=1):
                await until_generated(engine, 30 * step, since=began.generated_tokens)
                before = engine.stats().generated_tokens - began.generated_tokens
                manifest = publish(version)
                ack = await engine.load_weights(manifest, on_update)
                after = engine.stats().generated_tokens - began.generated_tokens
                assert (ack.version, ack.digest) == (version, manifest.digest)
                if on_update == "keep":
                    assert ack.reprefilled_tokens == 0
                else:  # all but perhaps the newest token
                    assert before - 1 <= ack.reprefilled_tokens - len(PROMPT) <= after
            answer = await running
            assert answer.versions == wanted
            assert len(answer.tokens) == 240
            assert all(len(segment) >= 1 for segment in answer.segments)
            assert len(answer.segments[0]) >= 30
            assert engine.stats().version == wanted[-1]

    with publishing(path) as publish:
        drive.run(scenario(publish))


def test_nothing_is_lost_or_doubled_under_updates(drive: Driver, path: Path) -> None:
    """The same weights under new versions must not change a single token of 200 uneven answers."""
    lengths = np.random.default_rng(0).geometric(0.06, 200).clip(1, 90)
    requests = [ask(f"r{i}", PROMPT[: 1 + i % 7], seed=i, max_tokens=int(n)) for i, n in enumerate(lengths)]

    async def run(updates: int, publish: Publish) -> list[Answer]:
        async with drive.engine(max_batch=32, prefill_chunk=16) as engine:
            began = engine.stats()
            running = asyncio.create_task(collect_all(engine, requests))
            for update in range(1, updates + 1):
                share = update * int(lengths.sum()) // (updates + 2)
                await until_generated(engine, share, since=began.generated_tokens)
                await engine.load_weights(publish(began.version + update), "keep" if update % 2 else "recompute")
            answers = await running
            assert engine.stats().generated_tokens - began.generated_tokens == lengths.sum()
            assert engine.stats().running == engine.stats().waiting == 0
            return answers

    with publishing(path) as publish:
        quiet, busy = drive.run(run(0, publish)), drive.run(run(6, publish))
    for answer, expected, length in zip(busy, quiet, lengths, strict=True):
        assert len(answer.tokens) == length
        assert drive.redrafts or answer.tokens.tolist() == expected.tokens.tolist()
        assert answer.versions == sorted(set(answer.versions))
    assert max(len(answer.segments) for answer in busy) >= 3
    assert len({version for answer in busy for version in answer.versions}) == 7


def test_pause_takes_no_step(drive: Driver) -> None:
    async def scenario() -> None:
        async with drive.engine() as engine:
            running = asyncio.create_task(collect(engine, ask("a", max_tokens=90)))
            await until_generated(engine, 5, since=engine.stats().generated_tokens)
            await engine.pause()
            before = engine.stats()
            late = asyncio.create_task(collect(engine, ask("b")))
            await asyncio.sleep(0.2)
            assert (engine.stats().steps, engine.stats().generated_tokens) == (before.steps, before.generated_tokens)
            assert engine.stats().waiting == 1
            await engine.resume()
            assert len((await running).tokens) == 90
            assert len((await late).tokens) == 12

    drive.run(scenario())


def test_weights_loaded_in_a_pause_do_not_end_it(drive: Driver, path: Path) -> None:
    async def scenario(publish: Publish) -> None:
        async with drive.engine() as engine:
            began = engine.stats()
            await engine.pause()
            running = asyncio.create_task(collect(engine, ask("a")))
            await engine.load_weights(publish(began.version + 1), "keep")
            await asyncio.sleep(0.2)
            assert engine.stats().generated_tokens == began.generated_tokens
            await engine.resume()
            assert (await running).versions == [began.version + 1]

    with publishing(path) as publish:
        drive.run(scenario(publish))


def test_abort_returns_what_was_sampled_and_frees_the_place(drive: Driver) -> None:
    async def scenario() -> None:
        async with drive.engine(max_batch=2) as engine:
            began = engine.stats().generated_tokens
            tasks = {name: asyncio.create_task(collect(engine, ask(name, max_tokens=250))) for name in ("a", "b", "c")}
            await until_generated(engine, 20, since=began)
            await engine.pause()
            tasks["d"] = asyncio.create_task(collect(engine, ask("d", max_tokens=250)))
            await asyncio.sleep(0)
            await engine.abort("d")
            await engine.abort("a")
            await engine.abort("nobody")
            await engine.resume()
            aborted, never_ran = await tasks["a"], await tasks["d"]
            assert (aborted.finish, never_ran.finish) == ("abort", "abort")
            assert 0 < len(aborted.tokens) < 250
            assert len(never_ran.tokens) == 0
            for name in ("b", "c"):
                answer = await tasks[name]
                assert (answer.finish, len(answer.tokens)) == ("length", 250)
                assert answer.tokens.tolist()[: len(aborted.tokens)] == aborted.tokens.tolist(), "same seed and prompt"

    drive.run(scenario())


def test_a_resumed_answer_goes_on_as_if_never_stopped(drive: Driver) -> None:
    async def scenario(temperature: float) -> None:
        async with drive.engine() as engine:
            whole = await collect(engine, ask("whole", seed=3, max_tokens=30, temperature=temperature))
            first = tuple(whole.tokens.tolist()[:11])
            resumed = ask("rest", PROMPT + first, seed=3, max_tokens=30, resumed=11, temperature=temperature)
            rest = await collect(engine, resumed)
            assert first + tuple(rest.tokens.tolist()) == tuple(whole.tokens.tolist())
            np.testing.assert_allclose(rest.logprobs, whole.logprobs[11:], atol=EXACT)

    drive.run(scenario(0.0))
    if (
        not isinstance(drive, SharedVllm) and not drive.redrafts
    ):  # vLLM cannot be told to continue a random stream; it begins another
        drive.run(scenario(1.0))


def test_stop_token_ends_the_answer_and_belongs_to_it(with_model: Driver) -> None:
    async def scenario() -> None:
        async with with_model.engine() as engine:
            free = await collect(engine, ask("free", max_tokens=40))
            stop = int(free.tokens[20])
            at = free.tokens.tolist().index(stop)
            absent = min(set(range(48)) - set(free.tokens.tolist()))
            stopped, other = await collect_all(
                engine, [ask("a", max_tokens=40, stop=(stop, 47, 46)), ask("b", max_tokens=40, stop=(absent,))]
            )
            assert other.tokens.tolist() == free.tokens.tolist()
            assert stopped.finish == "stop"
            assert stopped.tokens.tolist()[-1] in (stop, 47, 46)
            assert stopped.tokens.tolist() == free.tokens.tolist()[: len(stopped.tokens)]
            assert len(stopped.tokens) <= at + 1

    with_model.run(scenario())


def test_a_consumer_that_leaves_frees_its_place(drive: Driver, path: Path) -> None:
    async def scenario() -> None:
        async with drive.engine(max_batch=1) as engine:
            leaving = asyncio.create_task(collect(engine, ask("a", max_tokens=300)))
            await until_generated(engine, 3, since=engine.stats().generated_tokens)
            leaving.cancel()
            await asyncio.wait([leaving])
            assert engine.stats().running == 0
            assert len((await collect(engine, ask("b"))).tokens) == 12

    drive.run(scenario())


def test_close_ends_every_iterator_and_leaves_nothing_behind(drive: Driver, path: Path) -> None:
    async def scenario() -> None:
        tasks_before, processes_before = asyncio.all_tasks(), child_processes()
        engine = drive.own(max_batch=2)
        with pytest.raises(EngineError, match="is not started"):
            engine.submit(ask("early"))
        await engine.start()
        tasks = [asyncio.create_task(collect(engine, ask(str(i), max_tokens=300))) for i in range(5)]
        await until_generated(engine, 6)
        await engine.close()
        await engine.close()
        answers = await asyncio.gather(*tasks)
        assert [answer.finish for answer in answers] == ["abort"] * 5
        assert sum(len(answer.tokens) for answer in answers) >= 6

        await asyncio.sleep(0.1)
        assert not asyncio.all_tasks() - tasks_before
        assert not child_processes() - processes_before
        with pytest.raises(EngineError, match="is closed"):
            engine.submit(ask("late"))
        with publishing(path) as publish, pytest.raises(EngineError, match="is closed"):
            await engine.load_weights(publish(1), "keep")

    drive.run(scenario())


def test_requests_that_cannot_be_served_are_refused(drive: Driver, path: Path) -> None:
    async def scenario() -> None:
        async with drive.engine() as engine:
            running = asyncio.create_task(collect(engine, ask("a", max_tokens=200)))
            await until_generated(engine, 1, since=engine.stats().generated_tokens)
            with pytest.raises(EngineError, match="request a is already running"):
                engine.submit(ask("a"))
            with pytest.raises(EngineError, match="resumed=7"):
                engine.submit(ask("b", resumed=7))
            with pytest.raises(EngineError, match="max_tokens=3 leave"):
                engine.submit(ask("c", resumed=3, max_tokens=3))
            await running

    drive.run(scenario())


def test_greedy_answers_equal_transformers(with_model: Driver, reference: PreTrainedModel) -> None:
    prompts = [LONG[: 1 + 13 * i] for i in range(12)]
    requests = [ask(str(i), p, temperature=0.0, max_tokens=8 + i) for i, p in enumerate(prompts)]

    async def run() -> list[Answer]:
        async with with_model.engine(max_batch=9, prefill_chunk=32) as engine:
            return await collect_all(engine, requests)

    for request, answer in zip(requests, with_model.run(run()), strict=True):
        config = GenerationConfig(do_sample=False, max_new_tokens=request.sampling.max_tokens, pad_token_id=0)
        everything = torch.ones(1, len(request.tokens))  # else transformers hides prompt tokens that equal the padding
        theirs = reference.generate(torch.tensor([request.tokens]), attention_mask=everything, generation_config=config)
        assert answer.tokens.tolist() == theirs[0, len(request.tokens) :].tolist()
        expected = gathered(reference_logits(reference, request, answer), answer.tokens)
        np.testing.assert_allclose(answer.logprobs, expected, atol=EXACT)


def test_mixed_settings_report_the_distribution_sampled_from(with_model: Driver, reference: PreTrainedModel) -> None:
    """Rows of all kinds in one batch: log-probabilities equal transformers' processed ones, tokens are allowed ones."""
    kinds = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.9},
        {"top_k": 3},
        {"top_p": 0.6},
        {"temperature": 1.4, "top_k": 10, "top_p": 0.8},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
    ]
    requests = [ask(str(i), seed=i, max_tokens=40, **kinds[i % len(kinds)]) for i in range(28)]

    async def run() -> list[Answer]:
        async with with_model.engine() as engine:
            return await collect_all(engine, requests)

    for request, answer in zip(requests, with_model.run(run()), strict=True):
        logits = reference_logits(reference, request, answer)
        if request.sampling.temperature > 0:
            logits = processed(logits, request.sampling)
        expected = gathered(logits, answer.tokens)
        assert np.isfinite(expected).all(), "a token outside top-k or top-p was sampled"
        np.testing.assert_allclose(answer.logprobs, expected, atol=EXACT)


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_updates_use_new_weights_on_old_or_new_keys(
    with_model: Driver, path: Path, family: str, reference: PreTrainedModel, on_update: OnUpdate, tmp_path: Path
) -> None:
    others = [_checkpoint(tmp_path / str(seed), family, seed) for seed in (1, 2)]
    tokens = 400 if torch.cuda.is_available() else 120  # a card samples 120 before the weights are there
    requests = [ask(str(i), seed=i, max_tokens=tokens) for i in range(3)]

    async def run() -> tuple[int, list[Answer]]:
        async with with_model.engine(prefill_chunk=16) as engine:
            began = engine.stats()
            running = asyncio.create_task(collect_all(engine, requests))
            for step, directory in enumerate((tmp_path / "1", tmp_path / "2", path), start=1):
                await until_generated(engine, 75 * step, since=began.generated_tokens)
                with publishing(directory) as publish:
                    await engine.load_weights(publish(began.version + step), on_update)
            return began.version, await running

    first, answers = with_model.run(run())
    models = dict(enumerate([reference, *others, reference], start=first))
    for answer in answers:
        assert answer.versions == list(models)
        np.testing.assert_allclose(answer.logprobs, behaviour(models, PROMPT, answer, on_update), atol=EXACT)


def spoil(file: Path) -> None:
    file.write_bytes(b"\1" + file.read_bytes()[1:])


def test_a_wrong_digest_leaves_the_old_weights(with_model: Driver, family: str, tmp_path: Path) -> None:
    _checkpoint(tmp_path, family, seed=1)

    async def run() -> None:
        async with with_model.engine() as engine:
            version = engine.stats().version
            before = await collect(engine, ask("before", max_tokens=30))
            with publishing(tmp_path) as publish:
                spoiled = publish(version + 1)
                spoil(Path(spoiled.location))
                with pytest.raises(WeightSyncError, match=f"version {version} is kept"):
                    await engine.load_weights(spoiled, "keep")
            after = await collect(engine, ask("after", max_tokens=30))
            assert engine.stats().version == version
            assert after.versions == [version]
            assert after.tokens.tolist() == before.tokens.tolist()
            np.testing.assert_allclose(after.logprobs, before.logprobs, atol=EXACT)

    with_model.run(run())


def test_an_engine_without_fp8_keeps_its_version_when_the_trainer_means_fp8(with_model: Driver, path: Path) -> None:
    meant = Fp8Version(("model.layers.0.self_attn.q_proj.weight",))

    async def run() -> None:
        async with with_model.engine() as engine:
            version = engine.stats().version
            with publishing(path) as publish, pytest.raises(WeightSyncError, match=r"FP8|same layers"):
                await engine.load_weights(msgspec.structs.replace(publish(version + 1), fp8=meant), "keep")
            assert (await collect(engine, ask("after", max_tokens=5))).versions == [version]

    with_model.run(run())


@needs_vllm
def test_vllm_takes_a_version_of_which_nothing_is_in_fp8(shared_vllm: SharedVllm, path: Path) -> None:
    async def run() -> None:
        async with shared_vllm.engine() as engine:
            version = engine.stats().version
            with publishing(path) as publish:
                plain = msgspec.structs.replace(publish(version + 1), fp8=Fp8Version())
                await engine.load_weights(plain, "keep")
            assert (await collect(engine, ask("after", max_tokens=5))).versions == [version + 1]

    shared_vllm.run(run())


@needs_vllm
def test_vllm_drops_what_is_given_up_before_or_after_it_has_it(shared_vllm: SharedVllm) -> None:
    async def run() -> None:
        async with shared_vllm.engine() as engine:
            for turns in (0, 1, 2, 3, 100):
                stream = engine.submit(ask("a", max_tokens=500))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await engine.abort("a")
                assert [delta.finish async for delta in stream][-1] == "abort"
            await asyncio.gather(*engine._tasks)  # type: ignore[attr-defined]
            assert engine._serving().output_processor.get_num_unfinished_requests() == 0  # type: ignore[attr-defined]
            assert len((await collect(engine, ask("b", max_tokens=5))).tokens) == 5

    shared_vllm.run(run())
