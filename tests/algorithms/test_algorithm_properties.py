"""What must hold for every algorithm and correction, whatever the numbers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms import losses, registry
from asyncrl.algorithms.advantages import group_relative, leave_one_out
from asyncrl.algorithms.base import Samples, Tokens
from asyncrl.algorithms.registry import correct
from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import (
    Algorithm,
    Cispo,
    Correction,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Importance,
    Kl,
    Ppo,
    ReinforcePp,
    Reject,
    Rloo,
)
from asyncrl.training.batches import block, pack
from asyncrl.training.learner import Learner
from asyncrl.types import Group, Segment, Slot, Trajectory
from tests.support.tiny_model import tiny_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs" / "correction"
PRESETS: dict[str, Correction] = {
    path.stem: msgspec.convert(msgspec.yaml.decode(path.read_bytes()), Correction)
    for path in sorted(CONFIGS.glob("*.yaml"))
    if path.stem != "custom"
}
ALGORITHMS = (
    Grpo(),
    DrGrpo(),
    Dapo(),
    Rloo(),
    ReinforcePp(),
    Ppo(),
    Gspo(),
    Gspo(clip_low=0.2, clip_high=0.2),
    Cispo(),
)
# Arithmetic on a few tokens: what takes long is the first call of torch, which is no property.
quick = settings(max_examples=30, deadline=None)


class Batch(NamedTuple):
    """Random tokens in float64; log pi is a leaf."""

    logp_L: Tensor
    behaviour_L: Tensor
    advantage_L: Tensor
    samples: Samples


def _batches(*, longest: int = 5, spread: float = 3.0) -> st.SearchStrategy[Batch]:
    """Samples of uneven length with ratios up to exp(spread), ages 0 to 4, one advantage per sample."""
    token = st.tuples(st.floats(-8, -0.1), st.floats(-spread, spread), st.integers(0, 4))
    reward = st.floats(-3, 3, allow_subnormal=False)  # where a product is rounded to zero, its factors' order counts
    sample = st.tuples(st.lists(token, min_size=1, max_size=longest), reward)
    return st.lists(sample, min_size=1, max_size=4).map(_batch)


def _batch(drawn: list[tuple[list[tuple[float, float, int]], float]]) -> Batch:
    logp, log_rho, age = zip(*(token for tokens, _ in drawn for token in tokens), strict=True)
    lengths = torch.tensor([len(tokens) for tokens, _ in drawn])
    sample_L = torch.repeat_interleave(torch.arange(len(drawn)), lengths)
    logp_L = torch.tensor(logp, dtype=torch.float64)
    return Batch(
        logp_L=logp_L.clone().requires_grad_(),
        behaviour_L=logp_L - torch.tensor(log_rho, dtype=torch.float64),
        advantage_L=torch.tensor([advantage for _, advantage in drawn], dtype=torch.float64)[sample_L],
        samples=Samples(sample_L, len(drawn), torch.tensor(age)),
    )


_importance = st.builds(
    Importance,
    proximal=st.sampled_from(["trainer", "behaviour", "interpolated"]),
    weight=st.sampled_from(["none", "token", "sequence"]),
    floor=st.floats(0, 1),
    cap=st.floats(1, 8),
    outside=st.sampled_from(["truncate", "mask"]),
    reject=st.just(()),
)
_rejects = st.builds(
    Reject,
    measure=st.sampled_from(["ratio", "k2", "k3"]),
    over=st.sampled_from(["token", "mean", "sum", "max"]),
    low=st.floats(0, 0.9),
    high=st.floats(1, 4),
)


def _with(correction: Importance, **changes: Any) -> Importance:
    return Importance(**{name: getattr(correction, name) for name in correction.__struct_fields__} | changes)


def _loss(algorithm: Algorithm, correction: Correction, batch: Batch) -> Tensor:
    corrected = correct(correction, batch.logp_L, batch.behaviour_L, batch.samples)
    tokens = Tokens(batch.logp_L, corrected.proximal_logp_L, batch.advantage_L, batch.samples)
    return corrected.weight_L * registry.entry(algorithm).loss(algorithm, tokens).loss_L


def _gradient(loss_L: Tensor, batch: Batch) -> Tensor:
    return torch.autograd.grad(loss_L.sum(), batch.logp_L)[0]


@quick
@given(_batches())
def test_on_policy_every_preset_is_the_identity(batch: Batch):
    for name, preset in PRESETS.items():
        corrected = correct(preset, batch.logp_L, batch.logp_L.detach(), batch.samples)
        assert torch.equal(corrected.weight_L, torch.ones_like(batch.logp_L)), name
        assert corrected.kept_L.all(), name
        assert not corrected.truncated_L.any(), name
        assert torch.equal(corrected.proximal_logp_L, batch.logp_L), name


@quick
@given(_batches(), st.sampled_from(ALGORITHMS))
def test_without_a_cap_truncation_is_plain_importance_sampling(batch: Batch, algorithm: Algorithm):
    """r = 1 for the trainer's own policy, so what remains is the gradient of - rho A log pi."""
    correction = Importance(proximal="trainer", cap=1e300, reject=())
    rho_L = (batch.logp_L.detach() - batch.behaviour_L).exp()
    corrected = correct(correction, batch.logp_L, batch.behaviour_L, batch.samples)
    assert torch.allclose(corrected.weight_L, rho_L, rtol=1e-12)
    assert not corrected.truncated_L.any()
    if not isinstance(algorithm, Gspo):  # which shares the gradient of a sample out among its tokens
        found = _gradient(_loss(algorithm, correction, batch), batch)
        assert torch.allclose(found, -rho_L * batch.advantage_L, rtol=1e-9, atol=1e-12)
    products = batch.samples.spread(batch.samples.sum(rho_L.log()).exp())
    whole = correct(_with(correction, weight="sequence"), batch.logp_L, batch.behaviour_L, batch.samples)
    assert torch.allclose(whole.weight_L, products, rtol=1e-9)


@quick
@given(_batches(), _importance, st.lists(_rejects, max_size=2), st.floats(0, 0.5))
def test_weights_stay_within_their_bounds_and_are_constants(
    batch: Batch, correction: Importance, rejects: list[Reject], veto: float
):
    correction = _with(correction, reject=tuple(rejects), veto=veto)
    corrected = correct(correction, batch.logp_L, batch.behaviour_L, batch.samples)
    kept_L = corrected.weight_L[corrected.kept_L]
    assert ((kept_L >= correction.floor) & (kept_L <= correction.cap)).all()
    assert (corrected.weight_L[~corrected.kept_L] == 0).all()
    assert not corrected.weight_L.requires_grad
    assert not corrected.proximal_logp_L.requires_grad


@quick
@given(_batches(), _importance, _rejects, st.floats(0, 0.5), st.sampled_from(ALGORITHMS))
def test_rejection_never_changes_the_gradient_of_what_is_kept(
    batch: Batch, correction: Importance, reject: Reject, veto: float, algorithm: Algorithm
):
    strict = _with(correction, reject=(reject,), veto=veto)
    kept_L = correct(strict, batch.logp_L, batch.behaviour_L, batch.samples).kept_L
    without = _gradient(_loss(algorithm, correction, batch)[kept_L], batch)
    assert torch.equal(_gradient(_loss(algorithm, strict, batch), batch), without)
    if not isinstance(algorithm, Gspo):  # whose ratio has every token of the answer in it
        assert (without[~kept_L] == 0).all()


@quick
@given(_batches())
def test_decoupled_weight_and_ratio_make_up_the_full_ratio(batch: Batch):
    """prox / mu times pi / prox is pi / mu, at any age."""
    correction = Importance(proximal="interpolated", cap=1e300, reject=())
    corrected = correct(correction, batch.logp_L, batch.behaviour_L, batch.samples)
    tokens = Tokens(batch.logp_L, corrected.proximal_logp_L, batch.advantage_L, batch.samples)
    rho_L = (batch.logp_L - batch.behaviour_L).exp()
    assert torch.allclose(corrected.weight_L * tokens.ratio, rho_L, rtol=1e-9)


_rewards = st.lists(st.floats(-5, 5), min_size=2, max_size=8).map(np.array)


@quick
@given(_rewards)
def test_rloo_is_grpo_without_std_up_to_the_size_of_the_group(reward_G: np.ndarray):
    factor = len(reward_G) / (len(reward_G) - 1)
    expected = factor * group_relative(reward_G, normalize_std=False)
    assert leave_one_out(reward_G) == pytest.approx(expected, abs=1e-12)
    direct = [r - np.delete(reward_G, i).mean() for i, r in enumerate(reward_G)]
    assert leave_one_out(reward_G) == pytest.approx(direct, abs=1e-12)


@quick
@given(_batches())
def test_rloo_has_the_gradient_of_grpo_where_nothing_is_clipped(batch: Batch):
    on_policy = Importance(proximal="trainer", reject=(), weight="none")
    expected = _gradient(_loss(Grpo(), on_policy, batch), batch)
    assert torch.equal(_gradient(_loss(Rloo(), on_policy, batch), batch), expected)


@quick
@given(_batches(longest=1, spread=1.0), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_gspo_with_answers_of_one_token_is_token_ppo(batch: Batch, low: float, high: float):
    tokens = Tokens(batch.logp_L, batch.behaviour_L, batch.advantage_L, batch.samples)
    whole = losses.sequence_clipped(Gspo(clip_low=low, clip_high=high), tokens)
    single = losses.clipped(Ppo(clip_low=low, clip_high=high), tokens)
    assert torch.equal(whole.loss_L, single.loss_L)
    assert torch.equal(_gradient(whole.loss_L, batch), _gradient(single.loss_L, batch))
    assert whole.sums == single.sums


@quick
@given(_batches(), st.sampled_from(ALGORITHMS))
def test_at_ratio_one_every_loss_has_the_policy_gradient_of_its_sample(batch: Batch, algorithm: Algorithm):
    found = _gradient(_loss(algorithm, Importance(proximal="trainer", weight="none", reject=()), batch), batch)
    assert torch.allclose(found, -batch.advantage_L, rtol=1e-9, atol=1e-12)


# The same through a real learner and a real model.


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory)
    return directory


def _learner(
    model_path: Path, correction: Correction, algorithm: Algorithm | None = None, *, token_budget: int = 4096
) -> Learner:
    trainer = Trainer(grad_clip=1e9, token_budget=token_budget, device="cpu")
    return Learner(
        model_path,
        Run(trainer=trainer, rollout=Rollout(max_tokens=16), algorithm=algorithm or Grpo(), correction=correction),
    )


Mu = Callable[[np.ndarray, int, int], np.ndarray]


def _groups(learner: Learner, count: int, mu: Mu) -> list[Group]:
    """Groups of four uneven answers; `mu` gives behaviour log-probabilities from log pi, group and sample."""
    rng = np.random.default_rng(0)
    groups: list[Group] = []
    for group in range(count):
        prompt = Segment.given(rng.integers(0, 48, 4))
        samples: list[Trajectory] = []
        for sample in range(4):
            tokens = rng.integers(0, 48, rng.integers(1, 12))
            bare = _trajectory(Slot(group, sample), prompt, tokens, np.zeros(len(tokens)))
            (batch,) = pack([block(Group(id=0, trajectories=(bare,)), [0.0])], 100)
            logp = learner.token_logprobs(batch).detach().numpy()
            samples.append(_trajectory(Slot(group, sample), prompt, tokens, mu(logp, group, sample)))
        groups.append(Group(id=group, trajectories=tuple(samples)))
    return groups


def _trajectory(slot: Slot, prompt: Segment, tokens: np.ndarray, mu: np.ndarray) -> Trajectory:
    return Trajectory(
        slot=slot,
        prompt="p",
        segments=(prompt, Segment.sampled(tokens, mu, 0)),
        reward=float((slot.sample + slot.group) % 3),
        finish="stop",
        started=0.0,
        finished=1.0,
        engine="e",
    )


def _step(learner: Learner, *parts: list[Group]) -> list[Tensor]:
    """The gradients that the optimizer gets."""
    found: list[Tensor] = []
    parameters = list(learner.model.parameters())
    learner.optimizer.register_step_pre_hook(
        lambda *_: found.extend(p.grad.clone() for p in parameters if p.grad is not None)
    )
    for groups in parts:
        learner.accumulate(groups)
    assert not learner.step().skipped
    assert max(float(gradient.abs().max()) for gradient in found) > 1e-3
    return found


def _assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_on_policy_every_preset_trains_alike(model_path: Path):
    def exact(logp: np.ndarray, *_: int) -> np.ndarray:
        return logp

    naive = _learner(model_path, PRESETS["naive"])
    groups = _groups(naive, 2, exact)
    expected = _step(naive, groups)
    for preset in PRESETS.values():
        _assert_close(_step(_learner(model_path, preset), groups), expected)


def _one_far_off(logp: np.ndarray, group: int, sample: int) -> np.ndarray:
    """Ratios up to 1.01, and of e^3 in one sample."""
    return logp - (3.0 if (group, sample) == (0, 2) else 0.01 * np.linspace(-1, 1, len(logp)))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_rejected_sample_takes_nothing_from_the_others(
    model_path: Path, aggregation: Literal["token", "sequence", "constant"]
):
    """The gradient with rejection and that of the rejected sample by itself add up to the gradient without."""
    algorithm = Grpo(aggregation=aggregation)
    plain = Importance(reject=())
    strict = Importance(reject=(Reject(measure="k3", over="mean", high=0.1),))
    only = Importance(reject=(Reject(measure="k3", over="mean", low=0.1, high=1e9),))
    learners = [_learner(model_path, correction, algorithm) for correction in (plain, strict, only)]
    groups = _groups(learners[0], 2, _one_far_off)
    whole, kept, dropped = (_step(learner, groups) for learner in learners)
    _assert_close([a + b for a, b in zip(kept, dropped, strict=True)], whole)


def test_a_rejected_sample_is_one_of_weight_zero(model_path: Path):
    """Far out enough for the floor of masked weights, it has weight 0 without any rejection: the gradients agree."""
    strict = _learner(model_path, Importance(reject=(Reject(measure="ratio", over="max", high=2.0),)))
    weightless = _learner(model_path, Importance(outside="mask", reject=()))
    groups = _groups(strict, 2, _one_far_off)
    for found, expected in zip(_step(strict, groups), _step(weightless, groups), strict=True):
        assert torch.equal(found, expected)


@cache
def _whole(model_path: Path, aggregation: Literal["token", "sequence", "constant"]) -> tuple[list[Group], list[Tensor]]:
    learner = _learner(model_path, Importance(reject=()), _aggregated(aggregation))
    groups = _groups(learner, 4, _one_far_off)
    return groups, _step(learner, groups)


def _aggregated(aggregation: Literal["token", "sequence", "constant"]) -> Algorithm:
    return Grpo(aggregation=aggregation, kl=Kl(coefficient=0.1, estimator="k1"), entropy=0.01)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@settings(max_examples=5, deadline=None)
@given(order=st.permutations(range(4)), cut=st.integers(0, 4), token_budget=st.integers(8, 200))
def test_sums_do_not_depend_on_how_samples_are_split_over_batches(
    model_path: Path,
    aggregation: Literal["token", "sequence", "constant"],
    order: list[int],
    cut: int,
    token_budget: int,
):
    groups, expected = _whole(model_path, aggregation)
    learner = _learner(model_path, Importance(reject=()), _aggregated(aggregation), token_budget=token_budget)
    shuffled = [groups[i] for i in order]
    _assert_close(_step(learner, shuffled[:cut], shuffled[cut:]), expected)
