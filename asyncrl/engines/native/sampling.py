"""Drawing tokens: pure functions over rows of mixed settings.

One uniform number per token comes from a counter-based stream of (seed, position in the answer), so a draw does not
depend on who else is in the batch, and a resumed answer goes on with the same stream. Speculation has streams of its
own for what it draws besides, one for each `Purpose`.

Axis suffixes: N rows, V vocabulary.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_TO_24_BITS, _ONE, _UNIT = np.uint64(40), np.uint64(1), np.float32(2**-24)

Column = npt.NDArray[Any]


class RowSettings(NamedTuple):
    """How each row of a batch is sampled. A whole-batch switch is None where no row needs the work."""

    temperature_N_1: Tensor | None = None
    greedy_N_1: Tensor | None = None
    top_k_N_1: Tensor | None = None
    top_p_N_1: Tensor | None = None

    def repeated(self, times: int) -> "RowSettings":
        """For `times` rows in the place of each."""
        return RowSettings(*(None if x is None else x.repeat_interleave(times, 0) for x in self))


def row_settings(temperature_N: Column, top_k_N: Column, top_p_N: Column) -> RowSettings:
    """Greedy rows keep temperature 1 and the whole vocabulary: that is the distribution they report."""
    greedy_N = temperature_N == 0
    temperature_N = np.where(greedy_N, np.float32(1), temperature_N)
    top_k_N = np.where(greedy_N, 0, top_k_N)
    top_p_N = np.where(greedy_N, np.float32(1), top_p_N)
    restricted = bool((top_k_N > 0).any() or (top_p_N < 1).any())
    return RowSettings(
        torch.from_numpy(temperature_N).unsqueeze(1) if (temperature_N != 1).any() else None,
        torch.from_numpy(greedy_N).unsqueeze(1) if greedy_N.any() else None,
        torch.from_numpy(top_k_N).unsqueeze(1) if restricted else None,
        torch.from_numpy(top_p_N).unsqueeze(1) if restricted else None,
    )


class Purpose(IntEnum):
    """What a random number decides: the token itself, a drafted one, whether that is accepted, or what replaces it."""

    PLAIN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def stream_starts(seed: int) -> npt.NDArray[np.uint64]:
    """Where the stream of each purpose begins; the plain one at the seed itself."""
    start = np.uint64(seed % 2**64)
    others = _splitmix(np.array([~start] * 3) + _splitmix(np.arange(1, 4, dtype=np.uint64)))
    return np.concatenate([[start], others])


def uniforms_at(start: Column, position: Column) -> npt.NDArray[np.float32]:
    """Numbers in (0, 1] at positions of an answer: splitmix64."""
    mixed = _splitmix(position.astype(np.uint64) * _GOLDEN + start)
    return ((mixed >> _TO_24_BITS) + _ONE).astype(np.float32) * _UNIT


def sample(logits_N_V: Tensor, rows: RowSettings, uniform_N_1: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids and their log-probabilities under the distribution really sampled from, both N_1.

    The first token whose cumulative probability reaches u * total is taken. As 0 < u <= 1, it always has a
    probability above zero, whatever rounding does. Logits that are not numbers give a log-probability that is none.
    """
    token_N_1, probs_N_V = choose(logits_N_V, rows, uniform_N_1)
    return token_N_1, probs_N_V.gather(1, token_N_1).log_()


def choose(logits_N_V: Tensor, rows: RowSettings, uniform_N_1: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids N_1 and the distribution sampled from."""
    if rows.temperature_N_1 is not None:
        logits_N_V = logits_N_V / rows.temperature_N_1
    if rows.top_k_N_1 is not None and rows.top_p_N_1 is not None:
        logits_N_V = restrict(logits_N_V, rows.top_k_N_1, rows.top_p_N_1)
    probs_N_V = logits_N_V.softmax(-1)
    token_N_1 = draw(probs_N_V, uniform_N_1)
    if rows.greedy_N_1 is not None:
        token_N_1 = torch.where(rows.greedy_N_1, logits_N_V.argmax(-1, keepdim=True), token_N_1)
    return token_N_1, probs_N_V


def draw(weights_N_V: Tensor, uniform_N_1: Tensor) -> Tensor:
    """By inverting the cumulative sum of weights that need not add up to 1."""
    cumulative_N_V = weights_N_V.cumsum(-1)
    token_N_1 = torch.searchsorted(cumulative_N_V, cumulative_N_V[:, -1:] * uniform_N_1)
    return token_N_1.clamp_(max=weights_N_V.shape[1] - 1)  # only NaN goes beyond


def restrict(logits_N_V: Tensor, top_k_N_1: Tensor, top_p_N_1: Tensor) -> Tensor:
    """Top-k (0 keeps all), then top-p of what is left: the smallest set that reaches the mass; others become -inf."""
    ordered_N_V, index_N_V = logits_N_V.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_N_V.shape[1], device=logits_N_V.device)
    outside_N_V = (rank_V >= top_k_N_1) & (top_k_N_1 > 0)
    probs_N_V = ordered_N_V.masked_fill(outside_N_V, -torch.inf).softmax(-1)
    before_N_V = probs_N_V.cumsum(-1) - probs_N_V
    outside_N_V |= (before_N_V >= top_p_N_1) & (top_p_N_1 < 1)
    outside_N_V[:, 0] = False
    return logits_N_V.masked_fill(outside_N_V.scatter(1, index_N_V, outside_N_V), -torch.inf)


def _splitmix(x_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x_N = x_N + _GOLDEN
    x_N = (x_N ^ (x_N >> _SHIFTS[0])) * _MIX_1
    x_N = (x_N ^ (x_N >> _SHIFTS[1])) * _MIX_2
    return x_N ^ (x_N >> _SHIFTS[2])
