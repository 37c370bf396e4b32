"""The losses, one per token, and what any of them may be extended by: a KL penalty and an entropy bonus.

With the advantage A_t of a token, pi the policy being trained and r_t = pi(t) / pi_prox(t):

    clipped    - min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)     GRPO, Dr.GRPO, DAPO, REINFORCE++, PPO
    sequence   the same with s_i = exp(mean_t log r_t), the ratio of the whole completion, for every token    GSPO
    plain      - r_t A_t, whose gradient at r = 1 is that of - A_t log pi(t)                                  RLOO
    capped     - sg[min(r_t, cap)] A_t log pi(t): every token keeps its gradient                              CISPO
    supervised - log pi(t), the cross-entropy of data                                                         SFT

What weighs a token (corrections.py), aggregation and penalties are added by the learner. Which algorithm has which of
these, with which advantages, is in registry.py.
"""

from typing import Any, Literal

from torch import Tensor

from asyncrl.algorithms.base import Loss, Tokens
from asyncrl.config.algorithm import AlgorithmBase, Cispo, Clipped, CustomAlgorithm, Gspo, Supervised
from asyncrl.system.user_functions import calling, load_function

EXPECTED = "f(tokens: Tokens) that returns a tensor with one loss per sampled token, as long as tokens.logp_L"
"""Of a loss of the user's."""


def clipped(settings: Clipped, tokens: Tokens) -> Loss:
    """The clipped ratio of PPO (Schulman et al. 2017), which its descendants share.

    GRPO (Shao et al. 2024), Dr.GRPO (Liu et al. 2025), DAPO (Yu et al. 2025) and REINFORCE++ (Hu 2025) differ from each
    other in their advantages, in their bounds and in `aggregation`. DAPO's dynamic sampling happens where groups become
    complete, in the trajectory buffer.
    """
    return _clipped(tokens.ratio, tokens.advantage_L, settings)


def sequence_clipped(settings: Gspo, tokens: Tokens) -> Loss:
    """GSPO (Zheng et al. 2025): the ratio of a whole completion, free of its length."""
    ratio_S = tokens.samples.mean(tokens.logp_L - tokens.proximal_logp_L).exp()
    return _clipped(tokens.samples.spread(ratio_S), tokens.advantage_L, settings)


def _clipped(ratio_L: Tensor, advantage_L: Tensor, settings: Clipped) -> Loss:
    plain_L = ratio_L * advantage_L
    clipped_L = ratio_L.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantage_L
    return Loss(-plain_L.minimum(clipped_L), {"clipped": (clipped_L < plain_L).sum()})


def plain(settings: AlgorithmBase, tokens: Tokens) -> Loss:
    """REINFORCE, as RLOO (Ahmadian et al. 2024) uses it."""
    return Loss(-tokens.ratio * tokens.advantage_L)


def capped(settings: Cispo, tokens: Tokens) -> Loss:
    """CISPO (MiniMax 2025): the ratio is capped as a constant."""
    ratio_L = tokens.ratio.detach()
    above = (ratio_L > settings.cap).sum()
    return Loss(-ratio_L.clamp(max=settings.cap) * tokens.advantage_L * tokens.logp_L, {"clipped": above})


def supervised(settings: Supervised, tokens: Tokens) -> Loss:
    """The cross-entropy of tokens that were written, not sampled."""
    return Loss(-tokens.logp_L)


def custom(settings: CustomAlgorithm, tokens: Tokens) -> Loss:
    """The user's own."""
    own = load_function(settings.function, "algorithm.function")
    with calling("algorithm.function", settings.function, EXPECTED):
        return Loss(_checked(own(tokens), tokens))


def _checked(given: Any, tokens: Tokens) -> Tensor:
    shape = tuple(tokens.logp_L.shape)
    if not isinstance(given, Tensor):
        raise TypeError(f"returned {given!r:.200}, and not a tensor of shape {shape}")
    if given.shape != tokens.logp_L.shape:
        raise ValueError(f"returned a tensor of shape {tuple(given.shape)}, and not of shape {shape}: do not average")
    if tokens.logp_L.requires_grad and not given.requires_grad:
        raise ValueError("returned a tensor without a gradient: it has to depend on tokens.logp_L or tokens.ratio")
    return given


def critic(value_L: Tensor, return_L: Tensor) -> Tensor:
    """(V_t - R_t)^2 / 2 for PPO's critic, with the returns R = A + V of before the update, A not yet normalised. One
    optimizer step is taken per batch, so the critic's old values are its present ones and clipping would do nothing."""
    return 0.5 * (value_L - return_L).square()


def kl(estimator: Literal["k1", "k2", "k3"], logp_L: Tensor, reference_logp_L: Tensor) -> Tensor:
    """Estimates of KL(pi || ref) from tokens of pi (Schulman 2020), with d = log pi - log ref:

    k1 = d (unbiased, of either sign),  k2 = d^2 / 2 (small bias),  k3 = exp(-d) - 1 + d (unbiased, never negative)
    """
    difference_L = logp_L - reference_logp_L
    match estimator:
        case "k1":
            return difference_L
        case "k2":
            return 0.5 * difference_L.square()
        case "k3":
            return (-difference_L).exp() - 1 + difference_L


def divergence(direction: Literal["reverse", "forward"], logp_L_B: Tensor, teacher_logp_L_B: Tensor) -> Tensor:
    """KL(pi || teacher) (reverse) or KL(teacher || pi) (forward) at each place, over buckets of the vocabulary: some
    tokens one by one, and all others together. Exact where the others are none, and otherwise a lower bound: putting
    tokens together brings distributions closer and never apart."""
    match direction:
        case "reverse":
            return (logp_L_B.exp() * (logp_L_B - teacher_logp_L_B)).sum(-1)
        case "forward":
            return (teacher_logp_L_B.exp() * (teacher_logp_L_B - logp_L_B)).sum(-1)


def entropy(logits_L_V: Tensor) -> Tensor:
    """Of the distribution of each token."""
    logp_L_V = logits_L_V.log_softmax(-1)
    return -(logp_L_V.exp() * logp_L_V).sum(-1)
