"""Drafts by an EAGLE or EAGLE-3 head, over a cache of its own with the rows and slots of the target's.

A head first follows the target over everything that the step has computed, one pair for each token, which leaves its
state at the newest one. From there it goes on alone, each pass fed with its own state; these keys lie behind the end
of the row, as drafts do in the target's cache. Chains are drawn from the head's distribution under the row's own
sampling settings; trees hold its likeliest tokens: every pass expands the likeliest nodes, and the likeliest of all are
kept.

Axis suffixes: T flat tokens, N rows, W columns, K nodes of a tree's level, C drafted tokens, E hidden size, U tokens
that the head can draft, V vocabulary.
"""

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.config.drafter import ActiveDrafter, Strategy
from asyncrl.config.engine import NativeEngine
from asyncrl.drafting.checkpoint import head_tensors
from asyncrl.drafting.heads import Head
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cpu.cache import Branches, KvCache, Layout
from asyncrl.engines.native.cpu.decoding import Policy
from asyncrl.engines.native.cpu.layout import store_by_columns
from asyncrl.engines.native.sampling import Column, Purpose, choose
from asyncrl.engines.native.speculation.ngram import Ngram
from asyncrl.engines.native.speculation.source import Seen, Taps, build_head, spare_slots
from asyncrl.engines.native.weight_loading import Receiver, load_published
from asyncrl.models.layers import computed_rotation
from asyncrl.types import WeightManifest


class Tree:
    """Grows by levels. A node's score is the log-probability of the path to it.

    Axis suffixes here: F nodes that are expanded, K children of each, C all candidates, X those kept.
    """

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


class HeadSource:
    """The head computes in fp32 whatever the target's dtype: it is small, and published so."""

    def __init__(self, head: Head, policy: Policy, max_rows: int, max_length: int) -> None:
        self._head, self._policy = head.requires_grad_(False), policy
        self.taps: Taps | None = head.config.taps
        store_by_columns(head)
        self.cache = KvCache(msgspec.structs.replace(policy.config, layers=1), max_rows, max_length, torch.float32)
        self._rotation = computed_rotation(policy.model.frequencies_D, torch.float32)

    def load(self, manifest: WeightManifest, receiver: Receiver) -> str:
        held = dict(head_tensors(self._head))
        digest = load_published(manifest, held, receiver)
        if self._head.drafts_U is not None:  # its two maps are computed, not views
            self._head.drafts_U.copy_(held["d2t"] + torch.arange(len(held["d2t"])))
        return digest

    def draft(self, slots: BatchTable, strategy: Strategy, seen: Seen) -> None:
        state_N_E = self._follow(slots, seen)
        if strategy.is_tree:
            self._draft_trees(slots, strategy, seen.ready_N, state_N_E)
        else:
            self._draft_chains(slots, strategy.depth, seen.ready_N, state_N_E)

    def _follow(self, slots: BatchTable, seen: Seen) -> Tensor:
        """Catch up with the target; the head's state at each row's newest pair."""
        layout, rows, width = seen.layout, seen.layout.rows, seen.layout.width
        gap_N = slots.head_computed[:rows] != seen.start_N
        slots.head_from[:rows][gap_N] = seen.start_N[gap_N]
        slots.head_computed[:rows] = slots.computed[:rows]
        next_T = slots.tokens[np.repeat(slots.index[:rows], width), layout.slots_T[: rows * width] + 1]
        next_T = np.concatenate([next_T, *(slots.tokens[c.row, c.start + 1 : c.end + 1] for c in layout.chunks)])
        assert seen.read_T_R is not None
        feature_T_E = self._head.features(seen.read_T_R.float())
        layout = layout._replace(first_N=self._first(slots))
        state_T_E = self._forward(feature_T_E, next_T, layout.slots_T, layout)
        return state_T_E[torch.from_numpy(np.arange(rows) * width + seen.last_N)]

    def _draft_chains(self, slots: BatchTable, depth: int, ready_N: Column, state_N_E: Tensor) -> None:
        assert slots.drafts is not None
        rows, settings = slots.count, slots.settings()
        known_N = slots.known[:rows]
        uniform_N_C = torch.from_numpy(slots.uniforms_of(Purpose.DRAFT, known_N[:, None] + np.arange(depth)))
        tokens_N_C, q_N_C_V = np.empty((rows, depth), np.int64), list[Tensor]()
        for index in range(depth):
            token_N_1, q_N_U = choose(self._logits(state_N_E), settings, uniform_N_C[:, index, None])
            tokens_N_C[:, index] = self._of_target(token_N_1)[:, 0].numpy()
            q_N_C_V.append(self._spread(q_N_U))
            if index + 1 < depth:
                slots_N = slots.computed[:rows] + index
                state_N_E = self._forward(
                    state_N_E, tokens_N_C[:, index], slots_N, self._behind(slots, slots_N, int(slots_N.max()) + 1)
                )
        q = torch.stack(q_N_C_V, 1).numpy()
        slots.drafts.hold_drawn(tokens_N_C, q, slots.drawn(), np.where(ready_N, depth, 0))

    def _draft_trees(self, slots: BatchTable, strategy: Strategy, ready_N: Column, state_N_E: Tensor) -> None:
        assert slots.drafts is not None
        rows, tree, temperature_N_1 = slots.count, Tree(strategy.top_k), slots.settings().temperature_N_1
        end_N, state_N_F_E = slots.computed[:rows], state_N_E[:, None]
        seen_N_K_X = np.zeros((rows, 1, 0), np.bool_)
        for level in range(strategy.depth):
            logits_N_F_U = self._logits(state_N_F_E.flatten(0, 1)).view(rows, state_N_F_E.shape[1], -1)
            if temperature_N_1 is not None:
                logits_N_F_U = logits_N_F_U / temperature_N_1[:, None]
            token_N_K, parent_N_K = tree.grow(logits_N_F_U.log_softmax(-1))
            if level + 1 == strategy.depth:
                break
            width = token_N_K.shape[1]
            seen_N_K_X = _descend(seen_N_K_X, parent_N_K.numpy())
            slots_N_K = end_N[:, None] + seen_N_K_X.shape[2] - width + np.arange(width)
            layout = self._behind(slots, slots_N_K.ravel(), int(slots_N_K.max()) + 1)
            layout = layout._replace(width=width, branches=Branches(end_N - 1, seen_N_K_X))
            feature_N_K_E = state_N_F_E[torch.arange(rows)[:, None], parent_N_K]
            tokens_X = self._of_target(token_N_K).flatten().numpy()
            positions_X = np.repeat(end_N + level, width)
            state_X_E = self._forward(feature_N_K_E.flatten(0, 1), tokens_X, positions_X, layout)
            state_N_F_E = state_X_E.view(rows, width, -1)
        tokens_N_X, parent_N_X, depth_N_X = tree.best(strategy.nodes)
        tokens_N_X = self._of_target(torch.from_numpy(tokens_N_X)).numpy()
        count_N = np.where(ready_N, tokens_N_X.shape[1], 0)
        slots.drafts.hold_trees(tokens_N_X, parent_N_X, depth_N_X, count_N)

    def _behind(self, slots: BatchTable, slots_X: Column, reach: int) -> Layout:
        """Of a pass of the head alone, behind the end of every row."""
        self.cache.reserve(slots.count, reach)
        return Layout(slots_X, slots.count, reach, [], first_N=self._first(slots))

    def _first(self, slots: BatchTable) -> Column | None:
        first_N = slots.head_from[: slots.count]
        return first_N if first_N.any() else None

    def _forward(self, feature_T_E: Tensor, tokens_T: Column, positions_T: Column, layout: Layout) -> Tensor:
        embedded_T_E = F.embedding(torch.from_numpy(tokens_T), self._policy.tensors.embedding_V_E).float()
        rotate = self._rotation(torch.from_numpy(positions_T))
        return self._head(feature_T_E, embedded_T_E, rotate, self.cache.attend(layout))

    def _logits(self, state_N_E: Tensor) -> Tensor:
        return self._head.logits(state_N_E, self._policy.output_E_V.t())

    def _of_target(self, token: Tensor) -> Tensor:
        """The target's ids."""
        return token if self._head.drafts_U is None else self._head.drafts_U[token]

    def _spread(self, q_N_U: Tensor) -> Tensor:
        """Over the target's vocabulary."""
        if self._head.drafts_U is None:
            return q_N_U
        q_N_V = q_N_U.new_zeros(q_N_U.shape[0], self._policy.config.vocabulary)
        return q_N_V.index_copy_(1, self._head.drafts_U, q_N_U)


def _descend(seen_N_F_X: Column, parent_N_K: Column) -> Column:
    """What each of K new nodes sees of the slots behind the row: what its parent sees, and itself."""
    rows, width = parent_N_K.shape
    inherited = np.take_along_axis(seen_N_F_X, parent_N_K[:, :, None], 1)
    own = np.broadcast_to(np.eye(width, dtype=np.bool_), (rows, width, width))
    return np.concatenate([inherited, own], 2)


def build_source(drafter: ActiveDrafter, policy: Policy, settings: NativeEngine) -> Ngram | HeadSource:
    if drafter.ngram is not None:
        return Ngram(drafter.ngram)
    assert drafter.head is not None, f"no source for {drafter!r}"
    head = build_head(drafter.head, policy.config)
    return HeadSource(head, policy, settings.max_batch, settings.max_length + spare_slots(drafter))
