"""Drafts that wait for the next step, as columns of arrays that move with the rows.

Axis suffixes: N rows, C drafted tokens of a row, W columns of a step (the row's own token and C), V vocabulary.
"""

import numpy as np
import torch

from asyncrl.engines.native.sampling import Column
from asyncrl.engines.native.speculation.verify import Drafted


class DraftTable:
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
