"""Every part of a correction against numbers worked out by hand, in float64, with the gradient that it lets through."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.algorithms import losses
from asyncrl.algorithms.base import Samples, Tokens
from asyncrl.algorithms.corrections import Caution, Corrected, log_ratio
from asyncrl.algorithms.registry import correct
from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import Correction, CustomCorrection, DrGrpo, Grpo, Importance, Reject
from asyncrl.training.batches import block, pack
from asyncrl.training.learner import Learner
from asyncrl.types import Group, Segment, Slot, Trajectory
from tests.support.tiny_model import tiny_checkpoint

LOG_MU = math.log(0.05)
LN2 = math.log(2)


def _samples(lengths: list[int], ages: list[int] | None = None) -> Samples:
    sample_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Samples(sample_L, len(lengths), torch.tensor(ages or [0] * sum(lengths)))


def _policies(rho: list[list[float]]) -> tuple[Tensor, Tensor]:
    """log pi and log mu of tokens with these ratios pi / mu."""
    log_rho = torch.tensor([r for sample in rho for r in sample], dtype=torch.float64).log()
    return (log_rho + LOG_MU).requires_grad_(), torch.full_like(log_rho, LOG_MU)


def _correct(settings: Correction, rho: list[list[float]], ages: list[int] | None = None) -> Corrected:
    """Ratios by sample."""
    return correct(settings, *_policies(rho), _samples([len(sample) for sample in rho], ages))


def _only(*rejects: Reject, **settings: Any) -> Importance:
    return Importance(weight="none", reject=rejects, **settings)


def test_token_weights_are_truncated_at_both_bounds():
    found = _correct(Importance(floor=0.5, cap=2.0, reject=()), [[4, 0.25], [1, 1.5]])
    assert found.weight_L.tolist() == pytest.approx([2, 0.5, 1, 1.5])
    assert found.truncated_L.tolist() == [True, True, False, False]
    assert found.kept_L.all()


def test_masking_drops_what_truncation_would_bound():
    found = _correct(Importance(floor=0.5, cap=2.0, outside="mask", reject=()), [[4, 0.25], [1, 1.5]])
    assert found.weight_L.tolist() == pytest.approx([0, 0, 1, 1.5])
    assert found.kept_L.tolist() == [False, False, True, True]


def test_a_weight_on_the_bound_is_inside():
    found = _correct(Importance(floor=1.0, cap=1.0, outside="mask", reject=()), [[1, 1]])
    assert found.weight_L.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("outside", "expected"), [("truncate", [4, 4, 0.5, 0.5, 0.5]), ("mask", [0, 0, 0.5, 0.5, 0.5])]
)
def test_sequence_weights_are_the_product_over_the_sample(outside: Any, expected: list[float]):
    # 2 * 3 = 6 is beyond 4; 0.5 * 0.5 * 2 = 0.5 is not
    found = _correct(Importance(weight="sequence", cap=4.0, outside=outside, reject=()), [[2, 3], [0.5, 0.5, 2]])
    assert found.weight_L.tolist() == pytest.approx(expected)
    assert found.truncated_L.tolist() == [True, True, False, False, False]


def test_prefix_weights_are_the_product_up_to_each_token():
    # 2, 2 * 3 = 6; in the next sample it begins again: 0.5, 0.25, 0.25 * 2 = 0.5
    found = _correct(Importance(weight="prefix", cap=4.0, reject=()), [[2, 3], [0.5, 0.5, 2]])
    assert found.weight_L.tolist() == pytest.approx([2, 4, 0.5, 0.25, 0.5])
    assert found.truncated_L.tolist() == [False, True, False, False, False]


def test_sequence_floor():
    # 0.5 * 0.5 = 0.25 is raised to 0.4
    found = _correct(Importance(weight="sequence", floor=0.4, cap=4.0, reject=()), [[0.5, 0.5]])
    assert found.weight_L.tolist() == pytest.approx([0.4, 0.4])


# Three samples. Ratios 4 and 1/4: geometric mean 1, product 1, largest 4. Ratios 2 and 2: 2, 4, 2. Ratio 1.
# k2 = (ln rho)^2 / 2 is 2 ln2^2 = 0.961 for 4 and 1/4, ln2^2 / 2 = 0.240 for 2, and 0 for 1.
# k3 = rho - 1 - ln rho is 3 - 2 ln 2 = 1.614 for 4, -3/4 + 2 ln 2 = 0.636 for 1/4, 1 - ln 2 = 0.307 for 2, 0 for 1:
#      over the first sample their mean is 1.125 and their sum 2.25, over the second 0.307 and 0.614.
RHO = [[4, 0.25], [2, 2], [1]]
NONE, FIRST, SECOND = [True] * 5, [False, False, True, True, True], [True, True, False, False, True]
REJECTIONS = {
    "ratio/token/high": (Reject(measure="ratio", over="token", high=3.0), [False, True, True, True, True]),
    "ratio/token/low": (Reject(measure="ratio", over="token", low=0.3, high=9.0), [True, False, True, True, True]),
    "ratio/mean/high": (Reject(measure="ratio", over="mean", high=1.9), SECOND),
    "ratio/mean/wide": (Reject(measure="ratio", over="mean", low=0.9, high=2.1), NONE),
    "ratio/mean/low": (Reject(measure="ratio", over="mean", low=1.1, high=2.1), [False, False, True, True, False]),
    "ratio/sum/high": (Reject(measure="ratio", over="sum", high=3.9), SECOND),
    "ratio/sum/wide": (Reject(measure="ratio", over="sum", high=4.1), NONE),
    "ratio/max/high": (Reject(measure="ratio", over="max", high=3.9), FIRST),
    "ratio/max/low": (Reject(measure="ratio", over="max", low=1.5, high=4.1), [True, True, True, True, False]),
    "k2/token": (Reject(measure="k2", over="token", high=0.5), FIRST),
    "k2/token/low": (Reject(measure="k2", over="token", low=0.5, high=1.0), [True, True, False, False, False]),
    "k2/mean": (Reject(measure="k2", over="mean", high=0.95), FIRST),
    "k2/mean/wide": (Reject(measure="k2", over="mean", high=0.97), NONE),
    "k2/sum": (Reject(measure="k2", over="sum", high=1.91), FIRST),
    "k2/sum/wide": (Reject(measure="k2", over="sum", high=1.93), NONE),
    "k2/max": (Reject(measure="k2", over="max", high=0.95), FIRST),
    "k3/token": (Reject(measure="k3", over="token", high=0.7), [False, True, True, True, True]),
    "k3/mean": (Reject(measure="k3", over="mean", high=1.12), FIRST),
    "k3/mean/wide": (Reject(measure="k3", over="mean", high=1.13), NONE),
    "k3/mean/tight": (Reject(measure="k3", over="mean", high=0.3), [False, False, False, False, True]),
    "k3/sum": (Reject(measure="k3", over="sum", high=2.24), FIRST),
    "k3/sum/wide": (Reject(measure="k3", over="sum", high=2.26), NONE),
    "k3/max": (Reject(measure="k3", over="max", high=1.6), FIRST),
    "k3/max/wide": (Reject(measure="k3", over="max", high=1.62), NONE),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection(name: str):
    reject, kept = REJECTIONS[name]
    found = _correct(_only(reject), RHO)
    assert found.kept_L.tolist() == kept
    assert found.weight_L.tolist() == [float(k) for k in kept]
    assert not found.truncated_L.any()


@pytest.mark.parametrize("over", ["token", "mean", "sum", "max"])
def test_asymmetric_bounds_are_those_of_rho_and_not_of_its_inverse(over: Any):
    """rho = 3 lies in [1/2, 4] and 1/3 does not; for 1 / rho it is the other way round."""
    found = _correct(_only(Reject(measure="ratio", over=over, low=0.5, high=4.0)), [[3], [1 / 3]])
    assert found.kept_L.tolist() == [True, False]


def test_a_sample_must_pass_every_rejection():
    rejects = (Reject(measure="ratio", over="mean", high=1.9), Reject(measure="ratio", over="max", high=3.9))
    assert _correct(_only(*rejects), RHO).kept_L.tolist() == [False, False, False, False, True]


def test_one_absurd_token_vetoes_its_sample_and_no_other():
    rho = [[1, 5e-5, 1], [1, 2e-4]]
    assert _correct(_only(veto=1e-4), rho).kept_L.tolist() == [False, False, False, True, True]
    assert _correct(_only(veto=0.0), rho).kept_L.all()


def test_rejected_tokens_lose_their_weight_and_the_others_keep_theirs():
    # the default: tokens truncated at 2, samples rejected from a K3 mean of 0.05
    found = _correct(Importance(), [[1.05, 1 / 1.05], [3, 3]])
    assert found.weight_L.tolist() == pytest.approx([1.05, 1 / 1.05, 0, 0])
    assert found.truncated_L.tolist() == [False, False, True, True]  # truncated and rejected: both are reported


def test_the_proximal_policy_is_interpolated_by_the_age_of_each_token():
    # share a = (age - 1) / age of log rho = ln 16 = 4 ln 2, and prox / mu = 16^a is the weight:
    #   age 0: the trainer's own policy, a = 1     age 1: mu itself, a = 0
    #   age 2: a = 1/2, 16^(1/2) = 4               age 4: a = 3/4, 16^(3/4) = 8
    settings = Importance(proximal="interpolated", cap=100.0, reject=())
    found = _correct(settings, [[16, 16, 16, 16]], ages=[0, 1, 2, 4])
    expected = [LOG_MU + k * LN2 for k in (4, 0, 2, 3)]
    assert found.proximal_logp_L.tolist() == pytest.approx(expected)
    assert found.weight_L.tolist() == pytest.approx([16, 1, 4, 8])


def test_bypass_takes_the_ratio_against_mu_and_puts_no_weight_on_top():
    found = _correct(Importance(proximal="behaviour", weight="token", reject=()), [[4, 0.25]])
    assert found.proximal_logp_L.tolist() == [LOG_MU] * 2
    assert found.weight_L.tolist() == [1, 1]


def test_the_trainers_policy_is_the_proximal_one_of_fresh_tokens():
    logp, behaviour = _policies([[4, 0.25]])
    found = correct(Importance(), logp, behaviour, _samples([2]))
    assert found.proximal_logp_L.tolist() == logp.tolist()


def test_a_step_far_off_policy_is_smaller_by_the_root_of_the_excess():
    caution = Caution(Importance(max_drift=0.01))
    caution.least = 0.0
    assert [caution.scale(drift) for drift in (0.0, 0.005, 0.01, 0.04, 1.0)] == [1.0, 1.0, 1.0, 0.5, 0.1]
    assert Caution(Importance(max_drift=0.0)).scale(1.0) == 1.0


def test_what_engines_are_off_by_with_the_same_weights_is_no_lateness():
    caution = Caution(Importance(max_drift=0.01))
    assert caution.scale(0.25) == 1.0  # the first step trains on the version that it sampled with
    assert caution.scale(0.29) == pytest.approx(0.5)
    assert caution.scale(0.0) == 1.0  # a step with nothing to learn from tells nothing
    assert caution.scale(0.04) == 1.0
    assert caution.scale(0.08) == pytest.approx(0.5)


def test_an_absurd_ratio_stays_finite():
    far = log_ratio(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]))
    assert far.tolist() == [20.0, -20.0]
    # 3 tokens of exp(20) each: their product is bounded again
    settings = Importance(weight="sequence", cap=1e30, reject=())
    assert _correct(settings, [[math.exp(20)] * 3]).weight_L.tolist() == pytest.approx([math.exp(20)] * 3)


def test_the_weight_multiplies_the_whole_clipped_term():
    """Decoupled PPO with rho = 16 of age 2: prox / mu = 4, r = pi / prox = 4.

    A = -1: - 4 min(-4, -1.28) = 16, gradient 16.   A = 1: - 4 min(4, 1.28) = -5.12, gradient 0.
    """
    logp, behaviour = _policies([[16, 16]])
    samples = _samples([2], [2, 2])
    settings = Importance(proximal="interpolated", cap=5.0, outside="mask", reject=())
    found = correct(settings, logp, behaviour, samples)
    advantage_L = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    loss_L = found.weight_L * losses.clipped(Grpo(), Tokens(logp, found.proximal_logp_L, advantage_L, samples)).loss_L
    assert loss_L.tolist() == pytest.approx([16, -5.12])
    (gradient,) = torch.autograd.grad(loss_L.sum(), logp)
    assert gradient.tolist() == pytest.approx([16, 0])


def test_truncated_importance_sampling_has_the_gradient_of_a_weighted_log_probability():
    """w = min(rho, 2) = 2, 0.5, and 0 where rejected by rho > 10; r = 1, so the gradient is - w A."""
    logp, behaviour = _policies([[4, 0.5], [11]])
    samples = _samples([2, 1])
    found = correct(Importance(reject=(Reject(measure="ratio", over="max", high=10.0),)), logp, behaviour, samples)
    advantage_L = torch.tensor([3.0, -1.0, 5.0], dtype=torch.float64)
    loss_L = found.weight_L * losses.clipped(Grpo(), Tokens(logp, found.proximal_logp_L, advantage_L, samples)).loss_L
    (gradient,) = torch.autograd.grad(loss_L.sum(), logp)
    assert gradient.tolist() == pytest.approx([-6, 0.5, 0])


def test_a_correction_of_the_users_own_is_found_by_name(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def weights(log_rho_L, samples):\n    return samples.spread(samples.mean(log_rho_L)).exp().clamp(max=1.5)\n"
    )
    # geometric means 1 and 2, the latter bounded by 1.5
    found = _correct(CustomCorrection(function=f"{tmp_path}/mine.py:weights"), [[4, 0.25], [2, 2]])
    assert found.weight_L.tolist() == pytest.approx([1, 1, 1.5, 1.5])
    assert found.kept_L.all()


def _group(learner: Learner) -> Group:
    """Two samples of two tokens, rewards 1 and 0, whose ratios are 4, 1 and 1, 1/2 under the learner's weights."""
    prompt = Segment.given([3, 4, 5])
    trajectories: list[Trajectory] = []
    for sample, (tokens, rho) in enumerate((([6, 7], [4, 1]), ([8, 9], [1, 0.5]))):
        mu = np.zeros(2)
        for _ in range(2):  # once to learn log pi, once to take log rho off it
            segments = (prompt, Segment.sampled(tokens, mu, 0))
            trajectory = Trajectory(
                slot=Slot(0, sample),
                prompt="p",
                segments=segments,
                reward=1.0 - sample,
                finish="stop",
                started=0.0,
                finished=1.0,
                engine="e",
            )
            (batch,) = pack([block(Group(id=0, trajectories=(trajectory,)), [0.0])], 100)
            mu = learner.token_logprobs(batch).detach().numpy() - np.log(rho)
        trajectories.append(trajectory)
    return Group(id=0, trajectories=tuple(trajectories))


def _gradient(model_path: Path, correction: Importance) -> tuple[float, list[Tensor]]:
    """Loss and gradients, as the optimizer gets them, of a Dr.GRPO step of two tokens at most."""
    settings = Trainer(grad_clip=1e9, device="cpu")
    run = Run(trainer=settings, rollout=Rollout(max_tokens=2), algorithm=DrGrpo(), correction=correction)
    learner = Learner(model_path, run)
    found: list[Tensor] = []
    parameters = list(learner.model.parameters())
    learner.optimizer.register_step_pre_hook(
        lambda *_: found.extend(p.grad.clone() for p in parameters if p.grad is not None)
    )
    learner.accumulate([_group(learner)])
    return learner.step().loss, found


def test_batch_normalisation_divides_the_gradient_by_the_mean_weight(tmp_path: Path):
    # Weights min(rho, 2) = 2, 1, 1, 1/2 have the mean 9/8. Advantages are 1/2, 1/2, -1/2, -1/2 and r = 1, so the loss
    # before is -(2/2 + 1/2 - 1/2 - 1/4) / 2 tokens / 2 samples = -3/16.
    tiny_checkpoint(tmp_path)
    loss, plain = _gradient(tmp_path, Importance(reject=()))
    _, normalised = _gradient(tmp_path, Importance(reject=(), batch_normalize=True))
    assert loss == pytest.approx(-3 / 16, rel=1e-5)
    assert max(float(gradient.abs().max()) for gradient in plain) > 1e-3
    for before, after in zip(plain, normalised, strict=True):
        assert torch.allclose(after, before / 1.125, rtol=1e-4, atol=1e-7)


def test_the_mean_weight_is_that_of_what_is_kept(tmp_path: Path):
    # The first sample is rejected by its ratio of 4. What is kept weighs 1 and 1/2: the mean is 3/4.
    tiny_checkpoint(tmp_path)
    reject = (Reject(measure="ratio", over="max", high=3.0),)
    _, plain = _gradient(tmp_path, Importance(reject=reject))
    _, normalised = _gradient(tmp_path, Importance(reject=reject, batch_normalize=True))
    assert max(float(gradient.abs().max()) for gradient in plain) > 1e-3
    for before, after in zip(plain, normalised, strict=True):
        assert torch.allclose(after, before / 0.75, rtol=1e-4, atol=1e-7)
