"""A drafting head beside its target, on the device.

The head follows its target over every token, so that drafts can begin at any of them: over prompts in the step that
computes them; over a row that drafts, in each step; over a row that does not, every so many steps, from what was kept
of them in a ring. Drafting is then a pass of the head for each token, from the newest one on.

Axis suffixes: N rows, B rows of the largest step, W columns, X rows times columns, R width of what is read of the
target, Q tokens of a ring, C drafted tokens, E hidden size, U tokens that the head can draft, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncrl.drafting.checkpoint import head_tensors
from asyncrl.drafting.heads import Head
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cuda.device_outputs import DeviceOutputs
from asyncrl.engines.native.cuda.graphs import GraphPool
from asyncrl.engines.native.cuda.inputs import Block, Shape, Sizes, StepInputs
from asyncrl.engines.native.cuda.kernels.shapes import Kv, Proposals, Queries
from asyncrl.engines.native.cuda.model import Block as ModelBlock
from asyncrl.engines.native.cuda.model import CudaModel, fp32_logits
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.engines.native.sampling import Column
from asyncrl.models.policy import Taps

RING = 16
"""Tokens of a row without drafts that the head may lag behind."""


class CudaHead:
    """What `asyncrl.drafting.heads` computes, with the kernels and pages of its target.

    Its keys and values are one layer more, in pages of the same numbers. As it has one layer only, they follow from
    features and tokens alone: where no draft begins, no more than that is computed.
    """

    def __init__(self, head: Head, target: CudaModel) -> None:
        self._target = target
        self._block = ModelBlock.of({name: each.detach() for name, each in head.named_parameters()})
        self._fc = head.fc.weight.detach().t()
        norms = head.embedding_norm, head.feature_norm, head.norm
        self._norms = [norm.detach() for norm in norms if norm is not None]
        """Of embedding, feature and state; EAGLE has none."""
        self._output_E_U = target.head_E_V if head.lm_head is None else head.lm_head.weight.detach().t()

    @property
    def vocabulary(self) -> int:
        """Tokens that it can draft."""
        return self._output_E_U.shape[1]

    def features(self, read_T_R: Tensor) -> Tensor:
        """From what was read of the target to what the others take."""
        return torch.mm(read_T_R, self._fc) if self._norms else read_T_R

    def store(self, feature_T_E: Tensor, tokens: Sequence[Tensor], queries: Sequence[Queries], kv: Kv) -> None:
        """Write keys and values; each token is the one behind its feature's."""
        self._target.store(self._block, self._inputs(feature_T_E, tokens)[1], queries, kv)

    def forward(self, feature_T_E: Tensor, tokens_T: Tensor, queries: Queries, kv: Kv) -> Tensor:
        """The head's state, which is also the feature of the next position if the head goes on alone."""
        x_T_E, y_T_X = self._inputs(feature_T_E, [tokens_T])
        y_T_X = self._target.attention(self._block, y_T_X, [queries], [queries], kv)
        return self._target.after_attention(self._block, x_T_E, y_T_X)

    def logits(self, state_T_E: Tensor) -> Tensor:
        normed_T_E = self._target.normed(state_T_E, self._norms[2]) if self._norms else state_T_E
        return fp32_logits(normed_T_E, self._output_E_U)

    def _inputs(self, feature_T_E: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The residual stream, and what attention reads."""
        target, embedded_T_E = self._target, self._target.embedded(tokens, tokens[0])
        if not self._norms:
            x_T_E = torch.mm(torch.cat([embedded_T_E, feature_T_E], -1), self._fc)
            return x_T_E, x_T_E
        parts = target.normed(embedded_T_E, self._norms[0]), target.normed(feature_T_E, self._norms[1])
        return feature_T_E.clone(), torch.cat(parts, -1)


class Drafting:
    """When the head follows its target, and when it drafts."""

    def __init__(
        self, head: Head, target: CudaModel, sizes: Sizes, inputs: StepInputs, board: DeviceOutputs, timeline: Timeline
    ) -> None:
        self._head, self._cuda_head, self._kernels = head, CudaHead(head, target), target.kernels
        self._inputs, self._board = inputs, board
        new, rows, size = target.embedding_V_E.new_zeros, sizes.rows, self._cuda_head.vocabulary
        self._ring_B_Q_R = new(rows, RING, head.config.read_width)
        self._feature_B_E = new(rows, head.config.target.hidden_size)
        """Of the token that drafting begins behind."""
        self._ids_U = new(size, dtype=torch.int32)
        self._token_B = new(rows, dtype=torch.int32)
        self._row_B = torch.arange(rows, device=self._ids_U.device)
        self._place_Q = torch.arange(RING, device=self._ids_U.device)
        self.proposals = Proposals(
            new(sizes.width - 1, rows, size, dtype=torch.float32),
            new(sizes.width - 1, rows, dtype=torch.float32),
            new(target.embedding_V_E.shape[0], dtype=torch.int32),
        )
        shapes = [(rows, RING), (rows,), (rows,), (rows, sizes.pages)]
        self._lagging = Block(shapes, [False] * len(shapes), timeline)
        self._pages = sizes.pages
        self.map_tokens()

    def held(self) -> dict[str, Tensor]:
        """Tensors by their published names. Maps between vocabularies are copies, which `map_tokens` takes."""
        return dict(head_tensors(self._head))

    def map_tokens(self, d2t_U: Tensor | None = None) -> None:
        """Between the head's tokens and the target's; published maps are differences."""
        plain_U = torch.arange(len(self._ids_U), dtype=torch.int32, device=self._ids_U.device)
        if self._head.drafts_U is not None:
            if d2t_U is not None:
                self._head.drafts_U.copy_(d2t_U + plain_U)
            self._ids_U.copy_(self._head.drafts_U)
        else:
            self._ids_U.copy_(plain_U)
        self.proposals.place_V.fill_(-1).index_copy_(0, self._ids_U.long(), plain_U)

    def taps(self) -> Taps | None:
        """None: it reads the final hidden states."""
        return Taps(self._head.config.taps) if self._head.config.taps else None

    def see(self, shape: Shape, read_T_R: Tensor, kv: Kv) -> None:
        """As a part of the target's step: follow what drafts begin behind, and prompts; keep the rest in the ring."""
        rows, count, device = shape.rows, shape.rows * shape.width, self._inputs.device
        tile_tokens = [device.tile_next_J_S[: shape.tiles].view(-1)] if shape.tiles else []
        if shape.follow:
            feature_T_E = self._cuda_head.features(read_T_R)
            taken_N, token_X = self._taken(rows), self._board.tokens(shape)
            queries = self._inputs.rows(rows, shape.width, device.start_N, taken_N)
            tokens, tiles = [token_X, *tile_tokens], self._inputs.tiles(shape)
            self._cuda_head.store(feature_T_E, tokens, [queries, *tiles], kv)
            last_N = self._row_B[:rows] * shape.width + (taken_N - 1).clamp(min=0)
            self._feature_B_E[:rows] = feature_T_E.index_select(0, last_N)
            self._board.ahead_W_B[0, :rows] = token_X.index_select(0, last_N)
            return
        if rows:
            slot_N = device.start_N[:rows].long() % RING
            self._ring_B_Q_R[self._row_B[:rows], slot_N] = read_T_R[:count]
        if tile_tokens:
            feature_T_E = self._cuda_head.features(read_T_R[count:])
            self._cuda_head.store(feature_T_E, tile_tokens, self._inputs.tiles(shape), kv)

    def draft(self, rows: int, depth: int, kv: Kv) -> None:
        """Tokens behind the newest one of each row, each from a pass over the one before it."""
        device, ahead_W_B = self._inputs.device, self._board.ahead_W_B
        temperature_N, token_N = device.temperature_N[:rows], self._token_B[:rows]
        feature_N_E, taken_N, last_N = self._feature_B_E[:rows], self._taken(rows), device.start_N[:rows] - 1
        for index in range(depth):
            position_N = last_N + taken_N + index
            count_N = ((taken_N > 0) & (position_N < device.room_N[:rows])).int()
            queries = self._inputs.rows(rows, 1, position_N, count_N)
            feature_N_E = self._cuda_head.forward(feature_N_E, ahead_W_B[index, :rows], queries, kv)
            logits_N_U = self.proposals.logits_C_B_U[index, :rows]
            logits_N_U.copy_(self._cuda_head.logits(feature_N_E))
            number_N_1 = (taken_N - 1 + index).clamp(min=0).long()[:, None]
            uniform_N = device.draft_N_C[:rows].gather(1, number_N_1).view(-1)
            logprob_N = self.proposals.logprob_C_B[index, :rows]
            self._kernels.sample(logits_N_U, temperature_N, uniform_N, token_N, logprob_N)
            ahead_W_B[index + 1, :rows] = self._ids_U.index_select(0, token_N)

    def catch_up(self, slots: BatchTable, table_N_P: Column, padded: int, graphs: GraphPool, kv: Kv) -> None:
        """Follow the rows over what is in the ring, as far as the token behind is known."""
        rows, (token_N_Q, start_N, count_N, sent_N_P) = slots.count, self._lagging.next()
        begin_N = slots.head_computed[:rows]
        end_N = np.minimum(slots.computed[:rows], slots.known[:rows] - 1)
        start_N[:rows], count_N[:rows], count_N[rows:padded] = begin_N, end_N - begin_N, 0
        places_N_Q = begin_N[:, None] + 1 + np.arange(RING)
        token_N_Q[:rows] = slots.tokens[slots.index[:rows, None], places_N_Q.clip(max=slots.tokens.shape[1] - 1)]
        sent_N_P[:rows] = table_N_P[:rows]
        self._lagging.send(self._lagging.begins[-1] + rows * self._pages)
        graphs.run(("catch up", padded), partial(self._catch_up, padded, kv))
        begin_N[:] = end_N

    def move_row(self, source: int, target: int) -> None:
        self._ring_B_Q_R[target].copy_(self._ring_B_Q_R[source])

    def _taken(self, rows: int) -> Tensor:
        """Tokens that each row gets in this step, within what it may fill; 0 where it gets none."""
        return torch.minimum(self._board.accepted(rows) + 1, self._inputs.device.count_N[:rows])

    def _catch_up(self, rows: int, kv: Kv) -> None:
        token_B_Q, start_B, count_B, table_B_P = self._lagging.device
        place_N_Q = (start_B[:rows, None] + self._place_Q) % RING
        read_N_Q_R = self._ring_B_Q_R[self._row_B[:rows, None], place_N_Q]
        queries = Queries(RING, self._row_B[:rows].int(), start_B[:rows], count_B[:rows], table_B_P)
        feature_T_E = self._cuda_head.features(read_N_Q_R.flatten(0, 1))
        self._cuda_head.store(feature_T_E, [token_B_Q[:rows].view(-1)], [queries], kv)
