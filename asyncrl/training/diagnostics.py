"""Sums over the tokens of a step, and the figures derived from them at its end.

Kept as sums so that micro-batches of any size add up to exactly what one big batch would have given.
"""

from collections.abc import Mapping

import torch


def ratio_sums(log_ratio_L: torch.Tensor) -> dict[str, float]:
    """Sums of the importance ratio rho = pi / mu and its relatives, taken before any truncation."""
    rho_L = log_ratio_L.exp()
    total, squared, k1, k3, gap = torch.stack(
        [
            rho_L.sum(),
            rho_L.square().sum(),
            -log_ratio_L.sum(),
            (rho_L - 1 - log_ratio_L).sum(),
            log_ratio_L.abs().sum(),
        ]
    ).tolist()
    return {"measured": float(len(log_ratio_L)), "rho": total, "rho_squared": squared, "k1": k1, "k3": k3, "gap": gap}


def step_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """ESS, mismatch KL and friends of one step; 1 and 0 when no token was measured."""
    count = sums.get("measured", 0.0)
    if not count:
        return {
            "rho_mean": 1.0,
            "ess": 1.0,
            "mismatch_kl": 0.0,
            "mismatch_k3": 0.0,
            "mismatch_abs": 0.0,
            "clip_fraction": 0.0,
        }
    return {
        "rho_mean": sums["rho"] / count,
        "ess": sums["rho"] ** 2 / (count * sums["rho_squared"]),
        "mismatch_kl": sums["k1"] / count,
        "mismatch_k3": sums["k3"] / count,
        "mismatch_abs": sums["gap"] / count,
        "clip_fraction": sums.get("clipped", 0.0) / count,
    }
