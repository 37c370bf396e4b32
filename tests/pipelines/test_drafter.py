"""Drafting heads from the command line: learned from a recorded run, exported, and taken by real vLLM."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from asyncrl.config import WarmStart
from asyncrl.config.drafter import Adaptive, DrafterTraining, Eagle3Drafter, EagleDrafter, HeadDrafter
from asyncrl.config.task import ChainsTask
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.drafting.checkpoint import fresh_head, load_head, save_head
from asyncrl.drafting.learner import DrafterLearner
from asyncrl.drafting.reading import read_windows
from asyncrl.drafting.store import HiddenStates
from asyncrl.engines.base import Engine
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.models.checkpoint import load_model
from asyncrl.models.config import read_config
from asyncrl.tasks.chains import Chains
from asyncrl.training.warm_start import make_model
from asyncrl.types import GIVEN, Request, Sampling, Segment, Slot, Trajectory
from tests.support import quickstart_runs
from tests.support.command import Done, asyncrl
from tests.support.driving import collect, native, serving
from tests.support.real_vllm import TINY, needs_vllm

TASK = ChainsTask()
ALWAYS = Adaptive(on=False)
"""A small target on a CPU is faster without drafts, and the bandit would find that out."""
DRAFTERS: dict[str, HeadDrafter] = {
    "eagle": EagleDrafter(tokens=3, adaptive=ALWAYS),
    "eagle3": Eagle3Drafter(tokens=3, adaptive=ALWAYS),
}


def drafter(*words: str) -> Done:
    return asyncrl("drafter", *words)


def test_a_head_is_learned_from_a_recorded_run_and_exported(tmp_path: Path, model: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "head"
    quickstart_runs.run(tmp_path, model, "steps=2", "flow.groups_per_step=8")
    refused = drafter("export", str(run), "--out", str(out))
    assert (refused.code, refused.out) == (2, "")
    assert f"has no trained drafter: make one with `asyncrl drafter train {run}`" in refused.err

    done = drafter("train", str(run), "--kind", "eagle", "--steps", "30")
    assert done.code == 0, done.err
    *progress, verdict = done.out.splitlines()
    assert len(progress) == 10
    assert progress[-1].startswith("update 30/30  loss ")
    before, after = verdict.removeprefix("held-out acceptance length ").split(" with ")[0].split(" -> ")
    assert float(after) > float(before)

    done = drafter("export", str(run), "--out", str(out))
    assert done.code == 0, done.err
    assert '"method": "eagle"' in done.out
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    trained, exported = (load_file(path / "model.safetensors") for path in (run / "drafter", out))
    assert trained.keys() == exported.keys()
    assert all(tensor.equal(exported[name]) for name, tensor in trained.items())
    assert load_head(out, read_config(model)).config.kind == "eagle"
    assert "exists already and is not empty" in drafter("export", str(run), "--out", str(out)).err

    for path in (run / "trajectories").iterdir():
        path.unlink()
    assert "recorded no trajectories to learn from" in drafter("train", str(run)).err


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for words in (["train", str(tmp_path)], ["export", str(tmp_path), "--out", str(tmp_path / "head")]):
        refused = drafter(*words)
        assert (refused.code, refused.out) == (2, "")
        assert "is not a run directory" in refused.err


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It writes answers of the right form, which is what there is to draft. vLLM wants heads of 32 numbers or more."""
    settings = WarmStart(hidden_size=64, heads=2, intermediate_size=128, steps=120)
    return make_model(settings, TASK, 0, tmp_path_factory.mktemp("small"))


async def answer(engine: Engine, model: Path, split: str, count: int, temperature: float) -> list[Trajectory]:
    tokenizer, chains = load_tokenizer(model), Chains(TASK, 0)

    async def one(index: int) -> Trajectory:
        prompt = tokenizer.encode(chains.chain(split, index).prompt)
        sampling = Sampling(max_tokens=80, temperature=temperature, stop=tokenizer.eos_ids)
        found = await collect(engine, Request(id=str(index), tokens=tuple(prompt), seed=index, sampling=sampling))
        given = Segment(token_bytes=np.array(prompt, np.int32).tobytes(), logprob_bytes=b"", version=GIVEN)
        return Trajectory(
            slot=Slot(index, 0),
            prompt=str(index),
            segments=(given, *found.segments),
            reward=0.0,
            finish=found.finish,
            started=0.0,
            finished=0.0,
            engine="test",
        )

    return list(await asyncio.gather(*map(one, range(count))))


@pytest.mark.slow
@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle", marks=pytest.mark.nightly)])
def test_vllm_accepts_what_an_exported_head_drafts(kind: str, small: Path, tmp_path: Path) -> None:
    drafting, settings = DRAFTERS[kind], DrafterTraining()
    model, config = load_model(small)

    async def plain() -> tuple[list[Trajectory], list[Trajectory]]:
        async with serving(native(small)) as engine:
            learned_from = await answer(engine, small, "train", 400, temperature=1.0)
            return learned_from, await answer(engine, small, "held_out", 40, temperature=0.0)

    recorded, greedy = asyncio.run(plain())
    head = fresh_head(drafting, config, 0)
    states = HiddenStates(settings.max_bytes, settings.held_out)
    states.add(read_windows(model, head.config, recorded, longest=settings.window_tokens))
    learner = DrafterLearner(head, model.embed_tokens.weight, model.output_matrix, settings)
    for _ in range(80):
        learner.update(states.batch(settings.batch_tokens))
    expected = learner.evaluate(states.judges(4096), drafting.tokens).length
    save_head(learner.head, tmp_path)

    async def speculative() -> tuple[list[Trajectory], float]:
        exported = msgspec.structs.replace(drafting, path=str(tmp_path))
        async with serving(build_vllm(small, TINY, exported, name="vllm")) as engine:
            found = await answer(engine, small, "held_out", 40, temperature=0.0)
            stats = engine.stats()
            return found, 1 + sum(stats.accepted_by_position) / stats.drafts

    found, length = asyncio.run(speculative())
    print(f"{kind}: vLLM accepts {length:.2f} tokens a step, {expected:.2f} were expected of sampled answers")
    for one, two in zip(greedy, found, strict=True):
        assert one.tokens.tolist() == two.tokens.tolist()
    assert length > 1.5
