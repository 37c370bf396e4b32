"""The forward pass of a decoder on a GPU: Triton kernels between cuBLAS products, over paged keys and values.

It computes what `asyncrl.models.decoder` does, from the same parameters in the same layout: nothing is derived from
the weights but views, so new ones are copied in place and captured graphs stay valid.

Axis suffixes: T flat tokens, E hidden size, X heads side by side or pages, K key/value heads, S tokens of a page,
D head dimension, L positions, C = D/2, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.drafting.heads import Head
from asyncrl.engines.native.cuda.kernels.shapes import Heads, Kernels, Queries
from asyncrl.models.decoder import Decoder, Layer, Taps


class Block(NamedTuple):
    """The parameters of a layer behind its first norm. Matrices are inputs by outputs: views of the transposes."""

    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, layer: Layer | Head, qk_norm: Tensor | None = None) -> "Block":
        return cls(
            *_linear(layer.qkv_proj),
            None if qk_norm is None else qk_norm.detach(),
            *_linear(layer.o_proj),
            layer.mlp_norm.detach(),
            *_linear(layer.gate_up_proj),
            *_linear(layer.down_proj),
        )


class CudaModel:
    def __init__(self, model: Decoder, length: int, kernels: Kernels) -> None:
        config, self.kernels = model.config, kernels
        self.heads, self._eps = Heads(config.heads, config.kv_heads, config.head_dim), config.norm_eps
        self.embedding_V_E = model.embed_tokens.weight.detach()
        self.head_E_V = model.output_matrix.detach().t()
        self._blocks = [Block.of(layer, layer.qk_norm) for layer in model.blocks()]
        self._input_norms = [layer.input_norm.detach() for layer in model.blocks()]
        self._norm_E = model.norm.detach()
        frequencies_C = model.frequencies_D[config.head_dim // 2 :]
        angles_L_C = torch.arange(length, device=frequencies_C.device)[:, None] * frequencies_C
        self._turns_2_L_C = torch.stack([angles_L_C.cos(), angles_L_C.sin()]).contiguous()

    def new_pages(self, pages: int, page: int, layers: int | None = None) -> Tensor:
        """By layers, keys and values, and pages."""
        layers = len(self._blocks) if layers is None else layers
        return self.embedding_V_E.new_zeros(layers, 2, pages, self.heads.keys, page, self.heads.dim)

    def forward(
        self,
        tokens: Sequence[Tensor],
        queries: Sequence[Queries],
        sampled: Tensor,
        kv: Sequence[Tensor],
        out_T_E: Tensor,
        taps: Taps | None = None,
    ) -> None:
        """Final hidden states of the first queries, or of all of them, as many as `out_T_E` has room for."""
        x_T_E = self.embedded(tokens, sampled)
        final = queries if out_T_E.shape[0] == x_T_E.shape[0] else queries[:1]
        for index, (block, kv_2_X_K_S_D) in enumerate(zip(self._blocks, kv, strict=True)):
            if taps is not None and index in taps.layers:
                taps.see(index, x_T_E.clone())
            wanted = queries if index + 1 < len(self._blocks) else final
            normed_T_E = self.normed(x_T_E, self._input_norms[index])
            y_T_X = self.attention(block, normed_T_E, queries, wanted, kv_2_X_K_S_D)
            x_T_E = self.after_attention(block, x_T_E[: y_T_X.shape[0]], y_T_X)
        self.kernels.rms_norm(x_T_E, self._norm_E, self._eps, out_T_E)

    def after_attention(self, block: Block, x_T_E: Tensor, y_T_X: Tensor) -> Tensor:
        """The rest of a layer; the residual stream is changed in place."""
        _add_product(x_T_E, y_T_X, block.out, block.out_bias)
        gate_up_T_X = _product(self.normed(x_T_E, block.mlp_norm), block.gate_up, block.gate_up_bias)
        y_T_F = gate_up_T_X.new_empty(x_T_E.shape[0], gate_up_T_X.shape[1] // 2)
        self.kernels.gated(gate_up_T_X, y_T_F)
        _add_product(x_T_E, y_T_F, block.down, block.down_bias)
        return x_T_E

    def logits(self, hidden_T_E: Tensor) -> Tensor:
        return fp32_logits(hidden_T_E, self.head_E_V)

    def normed(self, x_T_E: Tensor, weight_E: Tensor) -> Tensor:
        out_T_E = torch.empty_like(x_T_E)
        self.kernels.rms_norm(x_T_E, weight_E, self._eps, out_T_E)
        return out_T_E

    def embedded(self, tokens: Sequence[Tensor], sampled: Tensor) -> Tensor:
        counts = [part.shape[0] for part in tokens]
        x_T_E = self.embedding_V_E.new_empty(sum(counts), self.embedding_V_E.shape[1])
        for part, x in zip(tokens, x_T_E.split(counts), strict=True):
            self.kernels.embed(part, sampled, self.embedding_V_E, x)
        return x_T_E

    def attention(
        self, block: Block, x_T_E: Tensor, queries: Sequence[Queries], wanted: Sequence[Queries], kv: Tensor
    ) -> Tensor:
        """Of those wanted, which come first."""
        parts = self.store(block, x_T_E, queries, kv)  # all keys before any query: parts may be of the same row
        counts = [part.tokens for part in wanted]
        out_T_X = x_T_E.new_empty(sum(counts), self.heads.queries * self.heads.dim)
        for part, qkv, out in zip(wanted, parts, out_T_X.split(counts), strict=False):
            self.kernels.attend(qkv, kv, self.heads, part, out)
        return out_T_X

    def store(self, block: Block, x_T_E: Tensor, queries: Sequence[Queries], kv: Tensor) -> Sequence[Tensor]:
        """Write keys and values, and return what attention goes on with."""
        parts = _product(x_T_E, block.qkv, block.qkv_bias).split([part.tokens for part in queries])
        for part, qkv in zip(queries, parts, strict=True):
            self.kernels.rotate_and_store(qkv, self._turns_2_L_C, block.qk_norm, self._eps, kv, self.heads, part)
        return parts


def fp32_logits(hidden_T_E: Tensor, output_E_V: Tensor) -> Tensor:
    if hidden_T_E.dtype == torch.float32:
        return torch.mm(hidden_T_E, output_E_V)
    if not hidden_T_E.is_cuda:  # torch has no wider product there
        return torch.mm(hidden_T_E.float(), output_E_V.float())
    return torch.mm(hidden_T_E, output_E_V, out_dtype=torch.float32)


def _linear(linear: torch.nn.Linear) -> tuple[Tensor, Tensor | None]:
    biases = [tensor.detach() for name, tensor in linear.named_parameters() if name == "bias"]
    return linear.weight.detach().t(), biases[0] if biases else None


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def _add_product(x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    """In place, as part of the product: the residual stream is rounded once."""
    x.addmm_(y, matrix)
    if bias is not None:
        x.add_(bias)
