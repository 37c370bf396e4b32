"""Parts that any loss may be extended by: a KL penalty against a reference and an entropy bonus."""

from typing import Literal

from torch import Tensor


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


def entropy(logits_L_V: Tensor) -> Tensor:
    """Of the distribution of each token."""
    logp_L_V = logits_L_V.log_softmax(-1)
    return -(logp_L_V.exp() * logp_L_V).sum(-1)
