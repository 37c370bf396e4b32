"""Hand-computed numbers for advantages, corrections and the clipped loss."""

import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms import corrections, grpo
from asyncrl.algorithms.advantage import group_relative
from asyncrl.algorithms.base import Tokens
from asyncrl.algorithms.settings import Grpo, NoCorrection, TokenTis


def test_group_advantages_are_centered_and_scaled():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    assert group_relative(rewards, normalize_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert group_relative(rewards, normalize_std=True) == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
def test_a_group_of_equal_rewards_has_no_advantage_at_all(value: float):
    assert group_relative(np.full(8, value), normalize_std=True).tolist() == [0.0] * 8


def _tokens(ratio: list[float], advantage: list[float], weight: list[float]) -> tuple[Tokens, torch.Tensor]:
    logp = torch.tensor([math.log(r) for r in ratio], dtype=torch.float64, requires_grad=True)
    return (
        Tokens(
            logp_L=logp,
            proximal_logp_L=torch.zeros(len(ratio), dtype=torch.float64),
            weight_L=torch.tensor(weight, dtype=torch.float64),
            advantage_L=torch.tensor(advantage, dtype=torch.float64),
        ),
        logp,
    )


def test_loss_clips_only_where_the_clip_lowers_the_objective():
    # ratios 1.5 (A>0: clipped to 1.28), 1.5 (A<0: not clipped), 0.5 (A>0: not clipped), 0.5 (A<0: clipped to 0.8)
    tokens, logp = _tokens([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0], [1.0, 1.0, 1.0, 1.0])
    output = grpo.loss(Grpo(clip_low=0.2, clip_high=0.28), tokens)
    assert output.loss.item() == pytest.approx(-(1.28 - 1.5 + 0.5 - 0.8))
    assert output.sums == {"clipped": 2.0}
    output.loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])


def test_the_weight_multiplies_the_whole_clipped_term():
    tokens, _ = _tokens([1.5, 1.0], [1.0, 2.0], [2.0, 0.5])
    assert grpo.loss(Grpo(), tokens).loss.item() == pytest.approx(-(2.0 * 1.28 + 0.5 * 2.0))


def test_token_tis_truncates_at_the_cap_and_takes_the_ratio_against_the_current_policy():
    logp = torch.tensor([math.log(0.9), math.log(0.1)], requires_grad=True)
    behaviour = torch.tensor([math.log(0.3), math.log(0.2)])
    proximal, weight = corrections.apply(TokenTis(cap=2.0), logp, behaviour)
    assert weight.tolist() == pytest.approx([2.0, 0.5])
    assert proximal.tolist() == pytest.approx(logp.tolist())
    assert not proximal.requires_grad
    assert not weight.requires_grad


def test_no_correction_takes_the_ratio_against_the_behaviour_policy():
    logp, behaviour = torch.tensor([-1.0]), torch.tensor([-2.0])
    proximal, weight = corrections.apply(NoCorrection(), logp, behaviour)
    assert (proximal.tolist(), weight.tolist()) == ([-2.0], [1.0])


def test_an_absurd_ratio_stays_finite():
    ratio = corrections.log_ratio(torch.tensor([0.0]), torch.tensor([-1e4])).exp()
    assert torch.isfinite(ratio).all()
