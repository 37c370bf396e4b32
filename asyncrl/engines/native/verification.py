"""Speculation on the host: drafts that wait for the next step, and what becomes of them there.

A row's columns are its own last token and then its drafted ones, each behind its parent. The target's distribution p
at a column decides the token that follows it.

- A draft that was *drawn* from a distribution q is accepted with probability min(1, p/q). A rejected one is replaced
  by a draw from (p - q)+, and one token more is drawn from p where all are accepted. Each token is then distributed
  as p, whatever q is.
- Any other draft is a guess: the token is drawn from p as plain decoding draws it, with the same random number, and
  decoding goes on at the child that happens to be this token. Each token then *is* that of plain decoding.

Log-probabilities are always p's. `verify` is a pure function over the target's logits; `DraftTable` holds the drafts
until then. Axis suffixes: N rows, W columns of a step, C = W-1 drafted ones, X rows times columns, V vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.engines.native.sampling import Column, RowSettings, choose, draw


class Drafted(NamedTuple):
    """The columns of each row."""

    tokens_N_W: Column
    """Column 0 is the row's own token; it is not looked at."""
    parent_N_W: Column
    """Column that each one lies behind, always a smaller one."""
    valid_N_W: Column
    """Where there is a draft. False in column 0."""
    q_N_C_V: Tensor | None = None
    """What drawn drafts, always chains, were drawn from, without column 0. None: all drafts are guesses."""
    drawn_N: Column | None = None
    """Rows whose draft was drawn."""


class Uniforms(NamedTuple):
    """Random numbers for the token behind each column."""

    plain_N_W: Column
    accept_N_W: Column | None = None
    residual_N_W: Column | None = None


class Verdict(NamedTuple):
    """The tokens behind each row's own: `accepted` drafted ones and one more. Columns behind that are garbage."""

    tokens_N_W: Column
    logprobs_N_W: Column
    accepted_N: Column
    path_N_W: Column
    """Columns that the accepted tokens were drafted in, from column 0 on."""


def verify(logits_X_V: Tensor, settings: RowSettings, drafted: Drafted, uniform: Uniforms) -> Verdict:
    rows, width = drafted.tokens_N_W.shape
    token_X_1, p_X_V = choose(logits_X_V, settings.repeated(width), _column(uniform.plain_N_W))
    p_N_W_V = p_X_V.view(rows, width, -1)
    next_N_W = token_X_1.view(rows, width).numpy()
    fits_N_W = drafted.tokens_N_W == np.take_along_axis(next_N_W, drafted.parent_N_W, 1)
    if drafted.q_N_C_V is not None and drafted.drawn_N is not None:
        kept_N_W = _accepts(p_N_W_V, drafted.q_N_C_V, drafted.tokens_N_W, uniform)
        fits_N_W = np.where(drafted.drawn_N[:, None], kept_N_W, fits_N_W)
    accepted_N, path_N_W = follow(fits_N_W & drafted.valid_N_W, drafted.parent_N_W)
    index_N = np.arange(rows)
    last_N = path_N_W[index_N, accepted_N]
    final_N = next_N_W[index_N, last_N]
    if drafted.q_N_C_V is not None and drafted.drawn_N is not None:
        _replace_rejected(final_N, last_N, p_N_W_V, drafted, uniform)
    tokens_N_W = np.roll(np.take_along_axis(drafted.tokens_N_W, path_N_W, 1), -1, 1)
    tokens_N_W[index_N, accepted_N] = final_N
    logprobs_N_W = p_N_W_V[index_N[:, None], path_N_W, tokens_N_W].log().numpy()
    return Verdict(tokens_N_W, logprobs_N_W, accepted_N, path_N_W)


def follow(fits_N_W: Column, parent_N_W: Column) -> tuple[Column, Column]:
    """How many columns of an unbroken path from column 0 fit, and all columns with that path first, in order.

    Siblings are different tokens, so at most one of them fits.
    """
    on_path_N_W = np.zeros_like(fits_N_W)
    on_path_N_W[:, 0] = True
    for column in range(1, fits_N_W.shape[1]):
        parent_N_1 = parent_N_W[:, column, None]
        on_path_N_W[:, column] = fits_N_W[:, column] & np.take_along_axis(on_path_N_W, parent_N_1, 1)[:, 0]
    return on_path_N_W.sum(1) - 1, np.argsort(~on_path_N_W, 1, kind="stable")


def _accepts(p_N_W_V: Tensor, q_N_C_V: Tensor, tokens_N_W: Column, uniform: Uniforms) -> Column:
    """Whether each draft of a chain passes min(1, p/q)."""
    assert uniform.accept_N_W is not None
    passes_N_W = np.zeros(tokens_N_W.shape, np.bool_)
    token_N_C_1 = torch.from_numpy(tokens_N_W[:, 1:, None])
    p_N_C = p_N_W_V[:, :-1].gather(2, token_N_C_1)[..., 0].numpy()
    q_N_C = q_N_C_V.gather(2, token_N_C_1)[..., 0].numpy()
    passes_N_W[:, 1:] = uniform.accept_N_W[:, :-1] * q_N_C <= p_N_C
    return passes_N_W


def _replace_rejected(final_N: Column, last_N: Column, p_N_W_V: Tensor, drafted: Drafted, uniform: Uniforms) -> None:
    """Where a drawn draft was rejected, the token behind the last column comes from (p - q)+."""
    assert drafted.q_N_C_V is not None
    assert drafted.drawn_N is not None
    assert uniform.residual_N_W is not None
    rejected_N = last_N < drafted.valid_N_W.sum(1)
    rows_R = (drafted.drawn_N & rejected_N).nonzero()[0]
    if len(rows_R) == 0:
        return
    p_R_V = p_N_W_V[rows_R, last_N[rows_R]]
    residual_R_V = (p_R_V - drafted.q_N_C_V[rows_R, last_N[rows_R]]).clamp_(min=0)
    # Rounding may leave nothing where p and q agree; what is then drawn from p is as good.
    weights_R_V = torch.where(residual_R_V.sum(1, keepdim=True) > 0, residual_R_V, p_R_V)
    final_N[rows_R] = draw(weights_R_V, _column(uniform.residual_N_W[rows_R, last_N[rows_R]]))[:, 0].numpy()


def _column(uniform: Column) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(uniform)).view(-1, 1)


class DraftTable:
    """Drafts of all rows, as columns of arrays that move with the rows."""

    def __init__(self, rows: int, nodes: int) -> None:
        self.nodes = nodes
        """Drafted tokens of a row, at most."""
        self.count = np.zeros(rows, np.int64)
        self.tokens = np.zeros((rows, nodes), np.int64)
        self._chain = np.arange(nodes)
        self.parent = np.tile(self._chain, (rows, 1))
        """Column of the step that each one lies behind."""
        self.depth = self.parent + 1
        self.is_tree = False
        self._drawn = np.zeros(rows, np.bool_)
        self._q: Column | None = None  # not a tensor: rows are moved outside of torch's inference mode

    def width(self, rows: int) -> int:
        """Columns of a step that verifies all drafts."""
        return 1 + int(self.count[:rows].max())

    def hold_chains(self, tokens_N_C: Column, count_N: Column) -> None:
        """Guessed chains for the first rows."""
        rows, width = tokens_N_C.shape
        self.count[:rows] = count_N
        self.tokens[:rows, :width] = tokens_N_C
        self.parent[:rows], self.depth[:rows] = self._chain, self._chain + 1
        self.is_tree = False
        self._drawn[:rows] = False

    def hold_drawn(self, tokens_N_C: Column, q_N_C_V: Column, drawn_N: Column, count_N: Column) -> None:
        """Chains that were drawn from q, but for greedy rows, whose likeliest tokens they are."""
        self.hold_chains(tokens_N_C, count_N)
        rows, width = tokens_N_C.shape
        self._drawn[:rows] = drawn_N
        if self._q is None:
            with torch.inference_mode(False):  # rows also move between steps, outside of it
                self._q = np.zeros((len(self.count), self.nodes, q_N_C_V.shape[2]), np.float32)
        self._q[:rows, :width] = q_N_C_V

    def hold_trees(self, tokens_N_C: Column, parent_N_C: Column, depth_N_C: Column, count_N: Column) -> None:
        """Guessed trees."""
        rows, width = tokens_N_C.shape
        self.hold_chains(tokens_N_C, count_N)
        self.parent[:rows, :width], self.depth[:rows, :width] = parent_N_C, depth_N_C
        self.is_tree = True

    def clear(self) -> None:
        self.count[:] = 0

    def move(self, source: int, target: int) -> None:
        count = self.count[target] = self.count[source]
        for column in (self.tokens, self.parent, self.depth):
            column[target, :count] = column[source, :count]
        self._drawn[target] = self._drawn[source]
        if self._q is not None and self._drawn[source]:
            self._q[target, :count] = self._q[source, :count]

    def drafted(self, tokens_N_W: Column) -> Drafted:
        """What `verify` looks at, in a step with these tokens."""
        rows, width = tokens_N_W.shape
        parent_N_W = np.zeros((rows, width), np.int64)
        parent_N_W[:, 1:] = self.parent[:rows, : width - 1]
        column_W = np.arange(width)
        valid_N_W = (column_W > 0) & (column_W <= self.count[:rows, None])
        drawn_N = self._drawn[:rows] & (self.count[:rows] > 0)
        if self._q is None or not drawn_N.any():
            return Drafted(tokens_N_W, parent_N_W, valid_N_W)
        return Drafted(tokens_N_W, parent_N_W, valid_N_W, torch.from_numpy(self._q[:rows, : width - 1]), drawn_N)

    def ancestors(self, rows: int, width: int) -> Column:
        """N_W_W: which columns each column lies behind, itself included."""
        seen_N_W_W = np.zeros((rows, width, width), np.bool_)
        seen_N_W_W[:, 0, 0] = True
        index_N = np.arange(rows)
        for column in range(1, width):
            seen_N_W_W[:, column] = seen_N_W_W[index_N, self.parent[:rows, column - 1]]
            seen_N_W_W[:, column, column] = True
        return seen_N_W_W
