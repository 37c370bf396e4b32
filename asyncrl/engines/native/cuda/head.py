"""A drafting head on a GPU: what `asyncrl.drafting.heads` computes, with the kernels and pages of its target.

Its keys and values are one layer more, in pages of the same numbers. As it has one layer only, they follow from
features and tokens alone: where no draft begins, no more than that is computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.drafting.heads import Head
from asyncrl.engines.native.cuda.kernels.shapes import Kv, Queries
from asyncrl.engines.native.cuda.model import Block as ModelBlock
from asyncrl.engines.native.cuda.model import CudaModel, fp32_logits


class CudaHead:
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
