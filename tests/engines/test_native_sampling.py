"""Sampling as pure functions: the stream, the distribution and the restriction."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.native.sampling import RowSettings, restrict, row_settings, sample, uniforms_at
from asyncrl.types import Floats


def settings_of(temperature: float, rows: int) -> RowSettings:
    return row_settings(np.full(rows, temperature, np.float32), np.zeros(rows, np.int64), np.ones(rows, np.float32))


def uniforms(seed: int, count: int) -> Floats:
    """The plain stream at positions 0 to count-1."""
    return uniforms_at(np.array(seed % 2**64, np.uint64), np.arange(count))


def test_uniforms_are_uniform_and_independent() -> None:
    draws = np.concatenate([uniforms(seed, 50) for seed in range(4000)])
    assert draws.min() > 0
    assert draws.max() <= 1
    counts = np.histogram(draws, 100, (0, 1))[0]
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_square < 149, "99 degrees of freedom, p = 0.001"
    by_seed = draws.reshape(4000, 50)
    assert abs(np.corrcoef(by_seed[:-1, 0], by_seed[1:, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01


@given(st.integers(-(2**63), 2**64 - 1), st.integers(1, 50), st.integers(0, 50))
def test_a_stream_does_not_depend_on_how_far_it_is_drawn(seed: int, count: int, more: int) -> None:
    assert uniforms(seed, count + more)[:count].tolist() == uniforms(seed, count).tolist()


def test_samples_follow_the_softmax() -> None:
    logits_V = torch.tensor([1.0, -0.5, 2.0, 0.0, -3.0])
    rows = 100_000
    uniform = torch.from_numpy(uniforms(7, rows)).unsqueeze(1)
    tokens, logprobs = sample(logits_V.expand(rows, 5).contiguous(), settings_of(0.8, rows), uniform)
    expected = (logits_V / 0.8).softmax(-1)
    counts = torch.bincount(tokens[:, 0], minlength=5)
    chi_square = ((counts - rows * expected) ** 2 / (rows * expected)).sum()
    assert chi_square < 18.5, "4 degrees of freedom, p = 0.001"
    torch.testing.assert_close(logprobs[:, 0], expected.log()[tokens[:, 0]])


def test_the_ends_of_the_stream_stay_in_the_support() -> None:
    """u = 1 and the smallest u must not choose tokens of probability zero at either end of the vocabulary."""
    logits = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf]] * 2)
    tokens, _ = sample(logits, settings_of(1.0, 2), torch.tensor([[2.0**-24], [1.0]]))
    assert tokens[:, 0].tolist() == [1, 2]


def test_restriction_by_hand() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(5, 4)
    top_k = torch.tensor([[2], [0], [0], [3], [0]])
    top_p = torch.tensor([[1.0], [0.65], [0.75], [0.5], [1e-6]])
    kept = [row.nonzero()[:, 0].tolist() for row in restrict(logits, top_k, top_p).isfinite()]
    # Row 3: top-3 leaves 4/9, 3/9, 2/9, of which the first two reach one half.
    assert kept == [[1, 3], [1, 3], [1, 2, 3], [1, 3], [1]]


@given(st.integers(0, 2**32), st.integers(1, 8), st.floats(0.01, 1.0), st.integers(0, 10))
def test_restriction_keeps_the_likeliest(seed: int, rows: int, top_p: float, top_k: int) -> None:
    logits = torch.randn(rows, 12, generator=torch.Generator().manual_seed(seed))
    kept = restrict(logits, torch.full((rows, 1), top_k), torch.full((rows, 1), top_p)).isfinite()
    for row, mask in zip(logits, kept, strict=True):
        count = int(mask.sum())
        assert 1 <= count <= (top_k or 12)
        assert set(mask.nonzero()[:, 0].tolist()) == set(row.topk(count).indices.tolist())
