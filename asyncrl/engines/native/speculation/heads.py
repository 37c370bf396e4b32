"""Drafts by an EAGLE or EAGLE-3 head, over a cache of its own with the rows and slots of the target's.

A head first follows the target over everything that the step has computed, one pair for each token, which leaves its
state at the newest one. From there it goes on alone, each pass fed with its own state; these keys lie behind the end
of the row, as drafts do in the target's cache. Chains are drawn from the head's distribution under the row's own
sampling settings; trees hold its likeliest tokens.

Axis suffixes: T flat tokens, N rows, W columns, K nodes of a tree's level, C drafted tokens, E hidden size, U tokens
that the head can draft, V vocabulary.
"""

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.drafting.checkpoint import head_tensors
from asyncrl.drafting.heads import Head
from asyncrl.drafting.settings import Drafting, Eagle3Drafter, EagleDrafter, NgramDrafter, Strategy
from asyncrl.engines.native.cache import Branches, KvCache, Layout
from asyncrl.engines.native.decoding import Policy
from asyncrl.engines.native.layout import store_by_columns
from asyncrl.engines.native.published import Receiver, load_published
from asyncrl.engines.native.sampling import Column, Purpose, choose
from asyncrl.engines.native.slots import SlotTable
from asyncrl.engines.native.speculation.build import build_head, spare_slots
from asyncrl.engines.native.speculation.ngram import Ngram
from asyncrl.engines.native.speculation.source import Seen, Taps
from asyncrl.engines.native.speculation.tree import Tree
from asyncrl.engines.settings import NativeEngine
from asyncrl.models.rope import computed_rotation
from asyncrl.types import WeightManifest


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

    def draft(self, slots: SlotTable, strategy: Strategy, seen: Seen) -> None:
        state_N_E = self._follow(slots, seen)
        if strategy.is_tree:
            self._draft_trees(slots, strategy, seen.ready_N, state_N_E)
        else:
            self._draft_chains(slots, strategy.depth, seen.ready_N, state_N_E)

    def _follow(self, slots: SlotTable, seen: Seen) -> Tensor:
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

    def _draft_chains(self, slots: SlotTable, depth: int, ready_N: Column, state_N_E: Tensor) -> None:
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

    def _draft_trees(self, slots: SlotTable, strategy: Strategy, ready_N: Column, state_N_E: Tensor) -> None:
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

    def _behind(self, slots: SlotTable, slots_X: Column, reach: int) -> Layout:
        """Of a pass of the head alone, behind the end of every row."""
        self.cache.reserve(slots.count, reach)
        return Layout(slots_X, slots.count, reach, [], first_N=self._first(slots))

    def _first(self, slots: SlotTable) -> Column | None:
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


def build_source(drafter: Drafting, policy: Policy, settings: NativeEngine) -> Ngram | HeadSource:
    match drafter:
        case NgramDrafter():
            return Ngram(drafter)
        case EagleDrafter() | Eagle3Drafter():
            head = build_head(drafter, policy.config)
            return HeadSource(head, policy, settings.max_batch, settings.max_length + spare_slots(drafter))
        case _:
            raise AssertionError(f"no source for {drafter!r}")
