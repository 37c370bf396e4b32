"""Advantages from the rewards of one group. Axis suffix G: samples of a group."""

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6


def group_relative(reward_G: npt.NDArray[np.float64], *, normalize_std: bool) -> npt.NDArray[np.float64]:
    """A = r - mean(r), divided by std(r) where asked. All rewards equal: every advantage is exactly 0."""
    if np.all(reward_G == reward_G[0]):
        return np.zeros_like(reward_G)
    centered_G = reward_G - reward_G.mean()
    return centered_G / (reward_G.std() + EPSILON) if normalize_std else centered_G
