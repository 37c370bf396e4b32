"""Completions sampled with top-k or top-p are on-policy to the trainer that has the engine's weights."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import Grpo, Importance, Kl, ReinforcePp
from asyncrl.training.batches import block, pack
from asyncrl.training.learner import Learner
from asyncrl.types import Group, Segment, Slot, Trajectory
from tests.support.driving import Answer, MakeEngine, ask, collect_all, native, paged, serving
from tests.support.tiny_model import tiny_checkpoint

KINDS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 2},
    {"top_p": 0.8, "temperature": 0.7},
    {"top_k": 10, "top_p": 0.8, "temperature": 1.4},
]
PROMPTS = [(5, 17, 3, 40, 22, 9, 31), (1, 2), (44,)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory)
    return directory


def _sampled(make: MakeEngine, path: Path, sampling: dict[str, Any]) -> list[Group]:
    """Four completions of each prompt from a real engine, rewarded by turns."""
    requests = [
        ask(f"{group}/{sample}", prompt, seed=4 * group + sample, max_tokens=60, **sampling)
        for group, prompt in enumerate(PROMPTS)
        for sample in range(4)
    ]

    async def run() -> list[Answer]:
        async with serving(make(path)) as engine:
            return await collect_all(engine, requests)

    trajectories = [
        Trajectory(
            slot=Slot(number // 4, number % 4),
            prompt="p",
            segments=(Segment.given(request.tokens), *answer.segments),
            reward=float(number % 2),
            finish=answer.finish,
            started=0.0,
            finished=1.0,
            engine="e",
        )
        for number, (request, answer) in enumerate(zip(requests, asyncio.run(run()), strict=True))
    ]
    return [Group(id=i, trajectories=tuple(trajectories[4 * i : 4 * i + 4])) for i in range(len(PROMPTS))]


def _learner(path: Path, sampling: dict[str, Any], *, logits_bytes: int = 1 << 29, **parts: Any) -> Learner:
    parts = {"correction": Importance(weight="none", reject=()), **parts}
    return Learner(path, Run(rollout=Rollout(**sampling), trainer=Trainer(logits_bytes=logits_bytes), **parts))


def _gap(learner: Learner, groups: list[Group]) -> torch.Tensor:
    """log pi - log mu of every sampled token."""
    (batch,) = pack([block(group, [1.0] * 4) for group in groups], 100_000)
    with torch.no_grad():
        return learner.token_logprobs(batch) - batch.behaviour_logp_L


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("make", [native, paged])
def test_ratios_of_on_policy_tokens_are_one(model_path: Path, make: MakeEngine, sampling: dict[str, Any]) -> None:
    groups = _sampled(make, model_path, sampling)
    for logits_bytes in (1 << 29, 48 * 4 * 7):  # all at once, and seven tokens at a time
        learner = _learner(model_path, sampling, logits_bytes=logits_bytes)
        gap = _gap(learner, groups)
        assert len(gap) == 12 * 60
        assert gap.abs().max() < 1e-5
        learner.accumulate(groups)
        figures = learner.step().figures
        assert figures["rho_min"] == pytest.approx(1, abs=1e-5)
        assert figures["rho_max"] == pytest.approx(1, abs=1e-5)
        assert figures["mismatch_kl"] == pytest.approx(0, abs=1e-5)
        assert figures["clip_fraction"] == 0
        assert figures["outside_support"] == 0
    whole = _gap(_learner(model_path, {"temperature": sampling.get("temperature", 1.0)}), groups)
    assert whole.mean() < -0.05, "what a trainer over the whole vocabulary would see"


@pytest.mark.parametrize("sampling", KINDS)
def test_other_weights_give_finite_ratios(model_path: Path, tmp_path: Path, sampling: dict[str, Any]) -> None:
    """Many tokens lie outside the support of a model that has nothing in common with the one that sampled them."""
    tiny_checkpoint(tmp_path, seed=1)
    groups = _sampled(native, model_path, sampling)
    learner = _learner(tmp_path, sampling, algorithm=Grpo(entropy=0.01))
    assert _gap(learner, groups).isfinite().all()
    learner.accumulate(groups)
    report = learner.step()
    assert not report.skipped
    assert 0.2 < report.figures["outside_support"] <= 1
    assert all(map(np.isfinite, report.figures.values()))
    assert report.grad_norm > 0


def test_one_token_outside_the_support(model_path: Path) -> None:
    """By hand: its probability is its share of the support and itself."""
    one_token = [_completion(model_path, {}, token) for token in range(48)]
    likeliest = sorted(range(48), key=lambda token: -one_token[token])
    p = np.exp([one_token[token] for token in likeliest[:3]])
    for place, expected in enumerate([p[0] / (p[0] + p[1]), p[1] / (p[0] + p[1]), p[2] / p.sum()]):
        found = _completion(model_path, {"top_k": 2}, likeliest[place])
        assert found == pytest.approx(np.log(expected), abs=1e-5)


def _completion(path: Path, sampling: dict[str, Any], token: int) -> float:
    """The log-probability of a completion of one token."""
    segments = (Segment.given(PROMPTS[0]), Segment.sampled([token], [-1.0], 0))
    alone = Trajectory(
        slot=Slot(0, 0), prompt="p", segments=segments, reward=1.0, finish="stop", started=0.0, finished=1.0, engine="e"
    )
    (batch,) = pack([block(Group(id=0, trajectories=(alone,)), [1.0])], 100)
    with torch.no_grad():
        return float(_learner(path, sampling).token_logprobs(batch))


@pytest.mark.parametrize("algorithm", [Grpo(kl=Kl(coefficient=0.1)), ReinforcePp(kl=Kl(coefficient=0.1))])
def test_the_reference_has_the_same_support(model_path: Path, algorithm: Any) -> None:
    """At its weights the penalty is 0, and so is what it adds to the gradient."""
    groups = _sampled(native, model_path, {"top_p": 0.8})
    learner = _learner(model_path, {"top_p": 0.8}, algorithm=algorithm)
    learner.accumulate(groups)
    report = learner.step()
    assert report.figures.get("reference_kl", 0.0) == pytest.approx(0, abs=1e-6)
    assert report.figures["rho_max"] == pytest.approx(1, abs=1e-5)


def test_greedy_completions_report_the_whole_distribution(model_path: Path) -> None:
    sampling = {"temperature": 0.0, "top_k": 5, "top_p": 0.5}
    groups = _sampled(native, model_path, sampling)
    assert _gap(_learner(model_path, sampling), groups).abs().max() < 1e-5
