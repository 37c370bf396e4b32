"""Verification as pure functions: by hand, token by token against plain sampling, and in distribution."""

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.native.sampling import Purpose, RowSettings, row_settings, sample, stream_starts, uniforms_at
from asyncrl.engines.native.verification import Drafted, Uniforms, follow, verify

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.2, 0.7, 0.1])
"""(P - Q)+ is [0.3, 0, 0.1]."""


def chain(tokens: list[int], q: torch.Tensor | None = None, *, drawn: bool = True) -> Drafted:
    """One row that drafts these tokens."""
    width = len(tokens) + 1
    columns = np.arange(width)
    return Drafted(
        np.array([[0, *tokens]]),
        np.maximum(columns - 1, 0)[None],
        (columns > 0)[None],
        None if q is None else q.expand(1, width - 1, -1),
        np.array([drawn]) if q is not None else None,
    )


def numbers(plain: list[float], accept: list[float], residual: list[float]) -> Uniforms:
    return Uniforms(*(np.array([x], np.float32) for x in (plain, accept, residual)))


def judged(drafted: Drafted, uniform: Uniforms, settings: RowSettings | None = None) -> tuple[list[int], list[float]]:
    width = drafted.tokens_N_W.shape[1]
    verdict = verify(P.log().expand(width, -1).contiguous(), settings or RowSettings(), drafted, uniform)
    count = int(verdict.accepted_N[0]) + 1
    return verdict.tokens_N_W[0, :count].tolist(), verdict.logprobs_N_W[0, :count].tolist()


def test_drawn_drafts_by_hand() -> None:
    """Token 1 has p/q = 3/7, tokens 0 and 2 have p > q."""
    two = chain([0, 1], Q)
    tokens, logprobs = judged(two, numbers([0.9, 0.9, 0.9], [1.0, 0.42, 0], [0, 0, 0]))
    assert tokens == [0, 1, 2], "both accepted, and u = 0.9 draws one more from p"
    np.testing.assert_allclose(np.exp(logprobs), [0.5, 0.3, 0.2], rtol=1e-6)
    tokens, logprobs = judged(two, numbers([0.9, 0.9, 0.9], [1.0, 0.44, 0], [0.1, 0.74, 0.1]))
    assert tokens == [0, 0], "the second is rejected; (p - q)+ gives token 0 up to u = 3/4"
    np.testing.assert_allclose(np.exp(logprobs), [0.5, 0.5], rtol=1e-6)
    tokens, logprobs = judged(two, numbers([0.1, 0.1, 0.1], [1.0, 0.44, 0], [0.1, 0.76, 0.1]))
    assert tokens == [0, 2]
    np.testing.assert_allclose(np.exp(logprobs), [0.5, 0.2], rtol=1e-6, err_msg="the residual has 1/4 there")


def test_a_draft_outside_the_targets_support_is_rejected() -> None:
    top_2 = row_settings(np.ones(1, np.float32), np.array([2]), np.ones(1, np.float32))
    tokens, logprobs = judged(chain([2], Q), numbers([0.5, 0.5], [2**-24, 0], [1.0, 0]), top_2)
    assert tokens == [0], "p = [5/8, 3/8, 0], of which (p - q)+ leaves token 0"
    np.testing.assert_allclose(np.exp(logprobs), [5 / 8], rtol=1e-6)


def test_guesses_by_hand() -> None:
    """Plain numbers 0.4, 0.7, 0.9 draw tokens 0, 1, 2, whatever is guessed."""
    plain = numbers([0.4, 0.7, 0.9], [0, 0, 0], [0, 0, 0])
    assert [judged(chain(guess), plain)[0] for guess in ([0, 1], [0, 2], [1, 1])] == [[0, 1, 2], [0, 1], [0]]
    greedy = row_settings(np.zeros(1, np.float32), np.zeros(1, np.int64), np.ones(1, np.float32))
    assert judged(chain([0, 1], Q, drawn=False), plain, greedy)[0] == [0, 0]


def test_the_path_through_a_tree_by_hand() -> None:
    """Root 0 with children 1, 2; 3, 4 behind 1; 5 behind 2; 6 behind 5."""
    parent = np.array([[0, 0, 0, 1, 1, 2, 5]] * 4)
    fits = np.zeros((4, 7), np.bool_)
    fits[0, [2, 3, 5, 6]] = True  # 3 fits, but its parent does not
    fits[1, [1, 4, 6]] = True
    fits[3] = [False, True, False, False, False, True, True]
    accepted, path = follow(fits, parent)
    assert accepted.tolist() == [3, 2, 0, 1]
    assert [row[: count + 1].tolist() for row, count in zip(path, accepted, strict=True)] == [
        [0, 2, 5, 6],
        [0, 1, 4],
        [0],
        [0, 1],
    ]


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 6), st.sampled_from([0.0, 0.7, 1.0]))
def test_guesses_change_no_token(seed: int, rows: int, width: int, temperature: float) -> None:
    """Whatever is guessed, in whatever tree: the tokens are those that plain sampling draws one by one."""
    rng = np.random.default_rng(seed)
    settings = row_settings(np.full(rows, temperature, np.float32), np.full(rows, 3), np.full(rows, 0.9, np.float32))
    parent = np.stack([[0, *(rng.integers(0, column) for column in range(1, width))] for _ in range(rows)])
    tokens = np.zeros((rows, width), np.int64)
    for row, column in np.ndindex(rows, width):  # siblings differ
        siblings = [tokens[row, c] for c in range(1, column) if parent[row, c] == parent[row, column]]
        tokens[row, column] = rng.choice(np.setdiff1d(np.arange(8), siblings))
    logits = torch.from_numpy(rng.normal(size=(rows, width, 8)).astype(np.float32))
    plain = rng.random((rows, width)).astype(np.float32)
    valid = np.broadcast_to(np.arange(width) > 0, (rows, width))
    verdict = verify(logits.flatten(0, 1), settings, Drafted(tokens, parent, valid), Uniforms(plain))
    for row in range(rows):
        one = RowSettings(*(None if x is None else x[row : row + 1] for x in settings))
        column, count = 0, int(verdict.accepted_N[row])
        for index in range(count + 1):
            uniform = torch.from_numpy(plain[row, column].reshape(1, 1))
            token, logprob = sample(logits[row, column][None], one, uniform)
            assert verdict.tokens_N_W[row, index] == token.item()
            np.testing.assert_allclose(verdict.logprobs_N_W[row, index], logprob.item(), atol=1e-6)
            children = [c for c in range(1, width) if parent[row, c] == column and tokens[row, c] == token.item()]
            assert len(children) == (index < count), "it stops where there is no such child, and only there"
            column = children[0] if children else column


def _draw(weights: npt.NDArray[np.float64], uniform: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return np.minimum(np.searchsorted(np.cumsum(weights), uniform), len(weights) - 1)


def test_drawn_drafts_leave_the_targets_distribution() -> None:
    """Two drafted tokens and one more, 60,000 times: each position, and pairs of them, are distributed as p."""
    rows = 60_000
    starts = np.stack([stream_starts(seed) for seed in range(rows)])
    streams = [uniforms_at(starts[:, purpose, None], np.arange(3)) for purpose in Purpose]
    tokens = np.zeros((rows, 3), np.int64)
    tokens[:, 1:] = _draw(Q.double().numpy(), streams[Purpose.DRAFT][:, :2])
    valid, parent = np.broadcast_to([False, True, True], (rows, 3)), np.broadcast_to([0, 0, 1], (rows, 3))
    drafted = Drafted(tokens, parent, valid, Q.expand(rows, 2, -1), np.ones(rows, np.bool_))
    uniform = Uniforms(streams[Purpose.PLAIN], streams[Purpose.ACCEPT], streams[Purpose.RESIDUAL])
    verdict = verify(P.log().repeat(rows * 3, 1), RowSettings(), drafted, uniform)
    overlap = float(torch.minimum(P, Q).sum())
    assert abs((verdict.accepted_N >= 1).mean() - overlap) < 0.01, "the best that any test can accept"
    first = np.bincount(verdict.tokens_N_W[:, 0], minlength=3)
    more = verdict.accepted_N >= 1
    second = np.bincount(verdict.tokens_N_W[more, 0] * 3 + verdict.tokens_N_W[more, 1], minlength=9)
    given_first = np.bincount(verdict.tokens_N_W[more, 0], minlength=3)
    expected_second = (given_first[:, None] * P.numpy()).ravel()
    chi_first = ((first - rows * P.numpy()) ** 2 / (rows * P.numpy())).sum()
    chi_second = ((second - expected_second) ** 2 / expected_second).sum()
    assert chi_first < 13.8, "2 degrees of freedom, p = 0.001"
    assert chi_second < 22.5, "6 degrees of freedom, p = 0.001"


def test_streams_of_different_purposes_are_independent() -> None:
    starts = np.stack([stream_starts(seed) for seed in range(4000)])
    draws = np.stack([uniforms_at(starts[:, purpose, None], np.arange(25)) for purpose in Purpose]).reshape(4, -1)
    correlation = np.corrcoef(draws) - np.eye(4)
    assert np.abs(correlation).max() < 0.015
    assert draws.min() > 0
    assert np.abs(draws.mean(1) - 0.5).max() < 0.005
