"""How far a step is off-policy: percentiles of any number of tokens, steps without any, and what all ranks found."""

import math

import numpy as np
import pytest
import torch

from asyncrl.training.diagnostics import Observed, RankStats, figures, of_all
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.report import OffPolicy


def observed(log_rho_L: torch.Tensor) -> Observed:
    """One sample of these tokens, all of weight 1."""
    rest_4_L = torch.zeros(4, 1).expand(4, len(log_rho_L))
    sample = torch.tensor([[float(log_rho_L.sum())], [float(len(log_rho_L))], [0.0]])
    return Observed(torch.cat([log_rho_L[None], rest_4_L]), sample, ["fp32"])


@pytest.mark.parametrize("count", [1, 2, 101, 1000])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    log_rho_L = torch.randn(count, generator=torch.Generator().manual_seed(count))
    found = figures([observed(log_rho_L)])
    expected = np.quantile(log_rho_L.exp().double().numpy(), [0.01, 0.5, 0.99])
    assert [found["rho_p1"], found["rho_p50"], found["rho_p99"]] == pytest.approx(expected.tolist(), rel=1e-5)


def test_percentiles_of_more_tokens_than_a_float_can_count() -> None:
    """A tenth of the tokens at 0.5, as many at 2, the others at 1, and all of them in the order that they came."""
    count = 2**24 + 20
    log_rho_L = torch.zeros(count)
    log_rho_L[::10] = -math.log(2)
    log_rho_L[5::10] = math.log(2)
    found = figures([observed(log_rho_L)])
    assert [found["rho_p1"], found["rho_p50"], found["rho_p99"]] == pytest.approx([0.5, 1.0, 2.0])
    assert found["measured_tokens"] == count


def test_a_step_with_nothing_measured_says_so() -> None:
    found = figures([])
    assert (found["ess"], found["measured_tokens"]) == (1.0, 0.0)
    assert found.keys() == figures([observed(torch.zeros(3))]).keys()


class TwoRanks(Ranks):
    """The first of two; the other has sent its part already."""

    world = 2

    def __init__(self, other: bytes = b"") -> None:
        self.sent, self._other = b"", other

    def exchange(self, message: bytes) -> list[bytes]:
        self.sent = message
        return [message, self._other or message]


def stats(group: int, size: float | None) -> RankStats:
    worst = None if size is None else OffPolicy(group=group, sample=1, size=size, log_ratio=(size,))
    return RankStats(0.0, 0.0, "", {}, [], worst)


@pytest.mark.parametrize(
    ("mine", "theirs", "group"),
    [(0.1, 0.2, 2), (0.2, 0.1, 1), (None, 0.1, 2), (0.1, None, 1), (0.1, math.nan, 2), (None, None, None)],
)
def test_the_sample_furthest_off_policy_is_that_of_all_ranks(
    mine: float | None, theirs: float | None, group: int | None
) -> None:
    sending = TwoRanks()
    of_all(sending, stats(2, theirs))
    found = of_all(TwoRanks(sending.sent), stats(1, mine)).off_policy
    assert (found.group if found else None) == group
