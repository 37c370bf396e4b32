"""Trees of drafts: every pass expands the likeliest nodes, and the likeliest of all are kept.

Axis suffixes: N rows, F nodes that are expanded, K children of each, C all candidates, X those kept, U tokens.
"""

import numpy as np
import torch
from torch import Tensor

from asyncrl.engines.native.sampling import Column


class Tree:
    """Grows by levels. A node's score is the log-probability of the path to it."""

    def __init__(self, children: int) -> None:
        self._children = children
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._levels: list[int] = []
        self._frontier_N_K: Tensor | None = None
        """Nodes that are expanded next, by their number among all candidates."""

    def grow(self, logp_N_F_U: Tensor) -> tuple[Tensor, Tensor]:
        """Give each of the F nodes of the frontier (at first the one root) its likeliest children.

        Returns the next frontier, the K likeliest of these: tokens, and which of the F nodes is the parent, both N_K.
        """
        rows, count, _ = logp_N_F_U.shape
        best_N_F_K, token_N_F_K = logp_N_F_U.topk(min(self._children, logp_N_F_U.shape[2]), -1)
        if self._frontier_N_K is None:
            parent_N_F, score_N_F = torch.full((rows, 1), -1), torch.zeros(rows, 1)
        else:
            parent_N_F = self._frontier_N_K
            score_N_F = torch.cat(self._scores, 1).gather(1, parent_N_F)
        width = best_N_F_K.shape[2]
        before = sum(scores.shape[1] for scores in self._scores)
        score_N_C = (score_N_F[:, :, None] + best_N_F_K).flatten(1)
        self._scores.append(score_N_C)
        self._tokens.append(token_N_F_K.flatten(1))
        self._parents.append(parent_N_F.repeat_interleave(width, 1))
        self._levels.append(score_N_C.shape[1])
        chosen_N_K = score_N_C.topk(min(self._children, count * width), -1).indices
        self._frontier_N_K = chosen_N_K + before
        return self._tokens[-1].gather(1, chosen_N_K), chosen_N_K // width

    def best(self, budget: int) -> tuple[Column, Column, Column]:
        """Tokens, columns of the parents (0 is the root) and depths of the `budget` likeliest nodes, parents first.

        A child's score is never above its parent's, and in a stable order ties go to the parent.
        """
        score_N_C, parent_N_C = torch.cat(self._scores, 1), torch.cat(self._parents, 1)
        order_N_C = score_N_C.sort(dim=1, descending=True, stable=True).indices
        kept_N_X = order_N_C[:, :budget].sort(1).values
        rows, width = kept_N_X.shape
        # One place more at the end, for the parent -1 of the first level.
        column_N_C = torch.zeros(rows, score_N_C.shape[1] + 1, dtype=torch.int64)
        column_N_C.scatter_(1, kept_N_X, torch.arange(1, 1 + width).expand(rows, width))
        parent_N_X = parent_N_C.gather(1, kept_N_X) % column_N_C.shape[1]
        depth_C = np.repeat(np.arange(1, 1 + len(self._levels)), self._levels)
        tokens_N_X = torch.cat(self._tokens, 1).gather(1, kept_N_X)
        return tokens_N_X.numpy(), column_N_C.gather(1, parent_N_X).numpy(), depth_C[kept_N_X.numpy()]
