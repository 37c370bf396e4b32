"""Every loss, advantage and penalty against numbers worked out by hand, in float64, with gradients."""

import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.algorithms import losses, registry
from asyncrl.algorithms.advantages import (
    EPSILON,
    Rewards,
    gae,
    group_relative,
    leave_one_out,
    overlong_penalty,
    whitened,
)
from asyncrl.algorithms.base import Loss, Samples, Tokens
from asyncrl.config.algorithm import (
    Algorithm,
    Cispo,
    CustomAlgorithm,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Kl,
    Overlong,
    Ppo,
    ReinforcePp,
    Rloo,
)
from asyncrl.errors import ConfigError
from asyncrl.models.head import TokenLogprobs
from asyncrl.training.advantages import TokenAdvantages
from asyncrl.training.batches import PackedBatch, block, pack
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.forward import PolicyForward
from asyncrl.types import Group, Segment, Slot, Trajectory

LN2, LN3 = math.log(2), math.log(3)


def _loss(settings: Algorithm, tokens: Tokens) -> Loss:
    return registry.entry(settings).loss(settings, tokens)


def _advantages(settings: Algorithm, rewards: list[Rewards]) -> list[Rewards]:
    return registry.entry(settings).advantages(settings, rewards)


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _tokens(ratio: list[float], advantage: list[float], lengths: list[int] | None = None) -> Tokens:
    """Tokens of these ratios against a proximal log-probability of 0; one sample unless lengths say otherwise."""
    lengths = lengths or [len(ratio)]
    sample_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Tokens(
        logp_L=_tensor(*map(math.log, ratio)).requires_grad_(),
        proximal_logp_L=torch.zeros(len(ratio), dtype=torch.float64),
        advantage_L=_tensor(*advantage),
        samples=Samples(sample_L, len(lengths), torch.zeros(len(ratio), dtype=torch.int64)),
    )


def _gradient(loss_L: Tensor, leaf: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss_L.sum(), leaf)
    return gradient.tolist()


def test_group_advantages_are_centered_and_scaled():
    rewards = np.array([3.0, 1.0, 1.0, -1.0])  # mean 1, variance (4 + 0 + 0 + 4) / 4 = 2
    assert group_relative(rewards, normalize_std=False).tolist() == [2.0, 0.0, 0.0, -2.0]
    scaled = 2 / (math.sqrt(2) + EPSILON)
    assert group_relative(rewards, normalize_std=True).tolist() == pytest.approx([scaled, 0.0, 0.0, -scaled])


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
def test_a_group_of_equal_rewards_has_no_advantage_at_all(value: float):
    rewards = np.full(8, value)
    assert group_relative(rewards, normalize_std=True).tolist() == [0.0] * 8
    assert leave_one_out(rewards).tolist() == [0.0] * 8
    tokens = torch.full((7,), value)  # of 14 times 0.1 the mean is rounded to another number
    assert [part.tolist() for part in whitened([tokens, tokens])] == [[0.0] * 7] * 2


def test_leave_one_out_compares_with_the_mean_of_the_others():
    # 1 - (2 + 6) / 2,  2 - (1 + 6) / 2,  6 - (1 + 2) / 2
    assert leave_one_out(np.array([1.0, 2.0, 6.0])).tolist() == pytest.approx([-3.0, -1.5, 4.5])
    assert leave_one_out(np.array([7.0])).tolist() == [0.0]


def test_the_overlong_penalty_is_a_straight_line_over_the_margin():
    lengths = np.array([1, 80, 85, 90, 100, 120])  # the last 20 of 100 tokens: a quarter in at 85, half at 90
    assert overlong_penalty(Overlong(penalty=1.0), lengths, 100).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(Overlong(penalty=2.0), lengths, 100).tolist() == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    assert overlong_penalty(Overlong(), lengths, 100).tolist() == [0.0] * 6
    assert overlong_penalty(Overlong(penalty=1.0, margin=0.0), np.array([99, 100]), 100).tolist() == [0.0, -1.0]


def test_generalised_advantages_of_two_samples_do_not_mix():
    reward, value = _tensor(0, 0, 1, 2), _tensor(0.5, 0.25, 0.75, 1)
    # discount = trace = 1/2, from the end of the first sample:
    #   delta_2 = 1 - 0.75 = 0.25                          A_2 = 0.25
    #   delta_1 = 0 + 0.5 * 0.75 - 0.25 = 0.125            A_1 = 0.125 + 0.25 * 0.25 = 0.1875
    #   delta_0 = 0 + 0.5 * 0.25 - 0.5 = -0.375            A_0 = -0.375 + 0.25 * 0.1875 = -0.328125
    # the second sample is one token: 2 - 1 = 1
    assert gae(reward, value, [3, 1], 0.5, 0.5).tolist() == [-0.328125, 0.1875, 0.25, 1.0]
    # discount = trace = 1: what is still to come, less the value
    assert gae(reward, value, [3, 1], 1.0, 1.0).tolist() == [0.5, 0.75, 0.25, 1.0]
    # trace = 0: one step only
    assert gae(reward, value, [3, 1], 1.0, 0.0).tolist() == [-0.25, 0.5, 0.25, 1.0]


def test_whitening_is_over_all_parts_together():
    first, second = whitened([_tensor(1, 2), _tensor(3, 6)])  # mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
    scale = math.sqrt(3.5) + EPSILON
    assert [*first.tolist(), *second.tolist()] == pytest.approx([-2 / scale, -1 / scale, 0.0, 3 / scale])


def test_the_critic_is_pulled_to_its_returns():
    value = _tensor(1, 3).requires_grad_()
    loss = losses.critic(value, _tensor(2, 1))
    assert loss.tolist() == [0.5, 2.0]
    assert _gradient(loss, value) == [-1.0, 2.0]


RATIO, ADVANTAGE = [1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "highest"),
    [(Grpo(), 1.28), (Dapo(), 1.28), (DrGrpo(), 1.2), (ReinforcePp(), 1.2), (Ppo(), 1.2), (Grpo(clip_high=0.4), 1.4)],
    ids=["grpo", "dapo", "dr_grpo", "reinforce_pp", "ppo", "clip_high=0.4"],
)
def test_the_clip_acts_only_where_it_lowers_the_objective(settings: Algorithm, highest: float):
    # r = 1.5: clipped where A > 0, kept where A < 0.  r = 0.5: kept where A > 0, clipped to 0.8 where A < 0.
    # d(r A) / d log pi = r A, and 0 where clipped.
    tokens = _tokens(RATIO, ADVANTAGE)
    loss = _loss(settings, tokens)
    assert loss.loss_L.tolist() == pytest.approx([-highest, 1.5, -0.5, 0.8, -2.2], rel=1e-12)
    assert _gradient(loss.loss_L, tokens.logp_L) == pytest.approx([0.0, 1.5, -0.5, 0.0, -2.2], rel=1e-12)
    assert loss.sums == {"clipped": 2.0}


def test_rloo_clips_nothing():
    tokens = _tokens(RATIO, ADVANTAGE)
    loss = _loss(Rloo(), tokens)
    assert loss.loss_L.tolist() == pytest.approx([-1.5, 1.5, -0.5, 0.5, -2.2], rel=1e-12)
    assert _gradient(loss.loss_L, tokens.logp_L) == pytest.approx([-1.5, 1.5, -0.5, 0.5, -2.2], rel=1e-12)


def test_gspo_clips_the_geometric_mean_of_a_whole_answer():
    # Ratios 4 and 1: s = 2. A > 0: clipped at 1.5, no gradient, though the second token's own ratio is 1.
    # A < 0: not clipped, each of the two token losses is 2, and ds / d log pi = s / 2 = 1, so 1 + 1 for either token.
    # One token of ratio 1.25, A = 2: 2.5 as in PPO.
    tokens = _tokens([4, 1, 4, 1, 1.25], [1, 1, -1, -1, 2], lengths=[2, 2, 1])
    loss = _loss(Gspo(clip_low=0.5, clip_high=0.5), tokens)
    assert loss.loss_L.tolist() == pytest.approx([-1.5, -1.5, 2, 2, -2.5], rel=1e-12)
    assert _gradient(loss.loss_L, tokens.logp_L) == pytest.approx([0, 0, 2, 2, -2.5], rel=1e-12)
    assert loss.sums == {"clipped": 2.0}


def test_cispo_caps_the_ratio_and_keeps_every_gradient():
    # weight min(r, 2) = 2, 0.5, 1; loss = - weight A log pi with log pi = 2 ln 2, - ln 2, 0; gradient = - weight A
    tokens = _tokens([4, 0.5, 1], [1, 1, -2])
    loss = _loss(Cispo(cap=2.0), tokens)
    assert loss.loss_L.tolist() == pytest.approx([-4 * LN2, 0.5 * LN2, 0.0], rel=1e-12)
    assert _gradient(loss.loss_L, tokens.logp_L) == pytest.approx([-2.0, -0.5, 2.0], rel=1e-12)
    assert loss.sums == {"clipped": 1.0}


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [LN2, -LN2], [1.0, 1.0]),
        ("k2", [LN2**2 / 2, LN2**2 / 2], [LN2, -LN2]),
        # exp(-d) - 1 + d with exp(-d) = 1/2 and 2; the derivative is 1 - exp(-d)
        ("k3", [LN2 - 0.5, 1 - LN2], [0.5, -1.0]),
    ],
)
def test_kl_estimators(estimator: Literal["k1", "k2", "k3"], values: list[float], gradients: list[float]):
    logp, reference = _tensor(0.5, 0.25).log().requires_grad_(), _tensor(0.25, 0.5).log()  # d = ln 2, - ln 2
    penalty = losses.kl(estimator, logp, reference)
    assert penalty.tolist() == pytest.approx(values, rel=1e-12)
    assert _gradient(penalty, logp) == pytest.approx(gradients, rel=1e-12)


def test_entropy_of_a_quarter_and_three_quarters():
    # H = -(1/4) ln(1/4) - (3/4) ln(3/4) = ln 4 - (3/4) ln 3, and dH / dlogit_i = - p_i (ln p_i + H):
    # ln(1/4) + H = -(3/4) ln 3 and ln(3/4) + H = (1/4) ln 3
    logits = _tensor(0, LN3, 0, 0).reshape(2, 2).requires_grad_()
    entropy = losses.entropy(logits)
    assert entropy.tolist() == pytest.approx([2 * LN2 - 0.75 * LN3, LN2], rel=1e-12)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert gradient.flatten().tolist() == pytest.approx([3 / 16 * LN3, -3 / 16 * LN3, 0.0, 0.0], abs=1e-15)


def test_advantages_of_every_algorithm():
    rewards = [np.array([1.0, 2.0, 6.0])]  # mean 3, variance (4 + 1 + 9) / 3 = 14 / 3
    centered = [-2.0, -1.0, 3.0]
    scaled = pytest.approx([a / (math.sqrt(14 / 3) + EPSILON) for a in centered])
    for settings in (Grpo(), Dapo(), Gspo(), Cispo()):
        assert _advantages(settings, rewards)[0].tolist() == scaled, settings
    off = {"normalize_std": False}
    for settings in (DrGrpo(), Grpo(**off), Gspo(**off), Cispo(**off), ReinforcePp(group_baseline=True)):
        assert _advantages(settings, rewards)[0].tolist() == centered, settings
    assert _advantages(Rloo(), rewards)[0].tolist() == pytest.approx([-3.0, -1.5, 4.5])
    for settings in (Ppo(), ReinforcePp()):  # of which advantages of tokens are made later
        assert _advantages(settings, rewards)[0].tolist() == [1.0, 2.0, 6.0]


class _Policy(PolicyForward):
    """Log-probabilities that are known, in place of a model's."""

    def __init__(self, logp_L: Tensor) -> None:
        self._logp_L = logp_L

    def __call__(self, batch: PackedBatch, *, entropy: bool = False) -> TokenLogprobs:
        return TokenLogprobs(self._logp_L)


def _two_tokens_and_one(settings: ReinforcePp) -> PackedBatch:
    """A group of a completion of two tokens with reward 1 and one of a token with reward 0."""
    (found,) = _advantages(settings, [np.array([1.0, 0.0])])
    prompt = Segment.given([3, 4])
    trajectories = tuple(
        Trajectory(
            slot=Slot(0, sample),
            prompt="p",
            segments=(prompt, Segment.sampled(tokens, [-1.0] * len(tokens), 0)),
            reward=1.0 - sample,
            finish="stop",
            started=0.0,
            finished=1.0,
            engine="e",
        )
        for sample, tokens in enumerate(([5, 6], [7]))
    )
    (batch,) = pack([block(Group(id=0, trajectories=trajectories), found.tolist())], 100)
    return batch


@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce_pp_normalises_over_tokens(group_baseline: bool):
    """Rewards of the tokens are 1, 1 and 0, with mean 2/3 and variance (1/9 + 1/9 + 4/9) / 3 = 2/9. A baseline is the
    same for all of them, and the normalisation takes it off again."""
    settings = ReinforcePp(group_baseline=group_baseline)
    batch = _two_tokens_and_one(settings)
    (credited,) = TokenAdvantages(settings, _Policy(_tensor()), None, None, Ranks()).assign([batch])
    scale = math.sqrt(2 / 9) + EPSILON
    assert credited.advantage_L.tolist() == pytest.approx([1 / 3 / scale, 1 / 3 / scale, -2 / 3 / scale], rel=1e-5)


def test_a_penalty_in_the_reward_is_taken_off_before_the_normalisation():
    """REINFORCE++ with beta = 1/2, rewards 1 and 0 and log pi - log ref = 0.2, 0.4 and -0.6.

    Rewards per token: -0.1, 1 - 0.2 and 0 + 0.3. Still to come: 0.7, 0.8 and 0.3, with mean 0.6 and variance
    (0.1^2 + 0.2^2 + 0.3^2) / 3 = 0.14 / 3.
    """
    settings = ReinforcePp(kl=Kl(coefficient=0.5, placement="reward"))
    batch = _two_tokens_and_one(settings)
    policy, reference = (_Policy(_tensor(*logp)) for logp in ((-1.0, -1.0, -2.0), (-1.2, -1.4, -1.4)))
    (credited,) = TokenAdvantages(settings, policy, reference, None, Ranks()).assign([batch])
    scale = math.sqrt(0.14 / 3) + EPSILON
    assert credited.advantage_L.tolist() == pytest.approx([0.1 / scale, 0.2 / scale, -0.3 / scale], rel=1e-5)


def test_only_advantages_over_the_step_wait_for_all_of_it():
    assert {settings for settings, entry in registry.ALGORITHMS.items() if entry.whole_step} == {Ppo, ReinforcePp}


def test_a_loss_of_the_users_own_is_found_by_name(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def loss(tokens):\n    return -tokens.logp_L * tokens.advantage_L\n")
    settings = CustomAlgorithm(function=f"{tmp_path}/mine.py:loss", normalize_std=False)
    entry = registry.entry(settings)
    tokens = _tokens([2, 1], [3, 1])
    assert entry.loss(settings, tokens).loss_L.tolist() == pytest.approx([-3 * LN2, 0.0])
    assert entry.advantages(settings, [np.array([1.0, 3.0])])[0].tolist() == [-1.0, 1.0]


def test_a_loss_that_does_not_exist_is_refused_by_its_field():
    with pytest.raises(ConfigError, match=r"algorithm\.function=nowhere:loss cannot be used"):
        registry.entry(CustomAlgorithm(function="nowhere:loss"))
