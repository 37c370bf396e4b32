"""The forward pass of a decoder on a GPU: Triton kernels between cuBLAS products, over paged keys and values.

It computes what `asyncrl.models.decoder` does, from the same parameters in the same layout: nothing is derived from
the weights but views, so new ones are copied in place and captured graphs stay valid.

Axis suffixes: T flat tokens, E hidden size, X heads side by side or pages, K key/value heads, S tokens of a page,
D head dimension, L positions, C = D/2, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Codes, Fp8Matrix, Heads, Kernels, Kv, Queries, SortedRows
from asyncrl.models.config import Experts
from asyncrl.models.decoder import Decoder
from asyncrl.models.policy import Taps

Matrix = Tensor | Fp8Matrix
"""What is no FP8 is inputs by outputs: a view of the transpose."""
Input = Tensor | Codes
"""What a matrix is multiplied with: in FP8, what was quantized for it."""
Named = Mapping[str, Tensor | Fp8Matrix]
Record = Callable[[Tensor], None]
"""(chosen_T_C)."""


class Block(NamedTuple):
    """The parameters of a layer behind its first norm."""

    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    mlp_norm: Tensor
    mlp: "Gated | Mixture"

    @classmethod
    def of(cls, named: Named, experts: Experts | None = None) -> "Block":
        """From a layer's or a head's parameters by their names."""
        norms = _optional(named, "qk_norm"), _optional(named, "mlp_norm")
        assert norms[1] is not None
        return cls(
            *_linear(named, "qkv_proj"),
            norms[0],
            *_linear(named, "o_proj"),
            norms[1],
            Gated(*_linear(named, "gate_up_proj"), *_linear(named, "down_proj"))
            if experts is None
            else Mixture.of(named, experts),
        )


class Gated(NamedTuple):
    up: Matrix
    """Gate and up."""
    up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


class Mixture(NamedTuple):
    """Of experts; their matrices lie one below the other, outputs by inputs."""

    router_E_X: Tensor
    up: Matrix
    down: Matrix
    config: Experts

    @classmethod
    def of(cls, named: Named, experts: Experts) -> "Mixture":
        router = named["experts.router"]
        assert isinstance(router, Tensor)
        return cls(router.t(), named["experts.gate_up"], named["experts.down"], experts)


class CudaModel:
    def __init__(
        self,
        model: Decoder,
        length: int,
        kernels: Kernels,
        in_fp8: Sequence[Mapping[str, Fp8Matrix]] = (),
        *,
        power_of_two: bool = False,
    ) -> None:
        """`in_fp8`: of each layer, the matrices that take the place of parameters."""
        self.config, self.kernels, self._power_of_two = model.config, kernels, power_of_two
        config = model.config
        self.heads, self._eps = Heads(config.heads, config.kv_heads, config.head_dim), config.norm_eps
        self.embedding_V_E = model.embed_tokens.weight.detach()
        self.head_E_V = model.output_matrix.detach().t()
        layers = [{name: each.detach() for name, each in layer.named_parameters()} for layer in model.blocks()]
        replaced = in_fp8 or [{}] * len(layers)
        self.blocks = [
            Block.of({**layer, **fp8}, config.experts_of(index))
            for index, (layer, fp8) in enumerate(zip(layers, replaced, strict=True))
        ]
        self.middle = len(self.blocks) // 2
        self.input_norms = [layer["input_norm"] for layer in layers]
        self._norm_E = model.norm.detach()
        frequencies_C = model.frequencies_D[config.head_dim // 2 :]
        angles_L_C = torch.arange(length, device=frequencies_C.device)[:, None] * frequencies_C
        self._turns_2_L_C = torch.stack([angles_L_C.cos(), angles_L_C.sin()]).contiguous()

    def new_pages(self, pages: int, page: int, layers: int, dtype: torch.dtype | None = None) -> Tensor:
        """By layers, keys and values, and pages."""
        shape = layers, 2, pages, self.heads.keys, page, self.heads.dim
        return self.embedding_V_E.new_zeros(shape, dtype=dtype)

    def forward(
        self,
        tokens: Sequence[Tensor],
        queries: Sequence[Queries],
        sampled: Tensor,
        kv: Sequence[Kv],
        out_T_E: Tensor,
        taps: Taps | None = None,
        pass_middle: Callable[[], None] | None = None,
        routes_X_S_L_C: Tensor | None = None,
    ) -> None:
        """Final hidden states of all queries, of the first, or of none: as many as `out_T_E` has room for.

        `pass_middle` is called between the layers before `middle` and the others. Experts that are chosen are written
        into `routes`; there are those of all queries only if the final hidden states are.
        """
        written = 0
        x_T_E = self.embedded(tokens, sampled)
        final = queries if out_T_E.shape[0] == x_T_E.shape[0] else queries[: min(1, out_T_E.shape[0])]
        for index, (block, held) in enumerate(zip(self.blocks, kv, strict=True)):
            if index == self.middle and pass_middle is not None:
                pass_middle()
            if taps is not None and index in taps.layers:
                taps.see(index, x_T_E.clone())
            wanted = queries if index + 1 < len(self.blocks) else final
            if not wanted:  # all that is left of the last layer
                self.store(block, self.normed_for(block.qkv, x_T_E, self.input_norms[index]), queries, held)
                return
            record = None
            if routes_X_S_L_C is not None and isinstance(block.mlp, Mixture):
                record = partial(self._record, routes_X_S_L_C[:, :, written], wanted)
                written += 1
            x_T_E = self.layer(self.input_norms[index], block, x_T_E, queries, wanted, held, record)
        self.kernels.rms_norm(x_T_E, self._norm_E, self._eps, out_T_E)

    def layer(
        self,
        norm_E: Tensor,
        block: Block,
        x_T_E: Tensor,
        queries: Sequence[Queries],
        wanted: Sequence[Queries],
        kv: Kv,
        record: Record | None = None,
    ) -> Tensor:
        y_T_X = self.attention(block, self.normed_for(block.qkv, x_T_E, norm_E), queries, wanted, kv)
        return self.after_attention(block, x_T_E[: y_T_X.shape[0]], y_T_X, record)

    def after_attention(self, block: Block, x_T_E: Tensor, y_T_X: Tensor, record: Record | None = None) -> Tensor:
        """The rest of a layer; the residual stream is changed in place. `record` gets the experts of each token."""
        self._add_product(x_T_E, self._quantized_for(block.out, y_T_X), block.out, block.out_bias)
        if isinstance(block.mlp, Mixture):
            self._add_experts(x_T_E, block.mlp, block.mlp_norm, record)
            return x_T_E
        mlp = block.mlp
        normed = self.normed_for(mlp.up, x_T_E, block.mlp_norm)
        y = self._gated_for(mlp.down, self._product(normed, mlp.up, mlp.up_bias))
        self._add_product(x_T_E, y, mlp.down, mlp.down_bias)
        return x_T_E

    def _add_experts(self, x_T_E: Tensor, mlp: Mixture, norm_E: Tensor, record: Record | None) -> None:
        """In place. Scores are of what is not quantized, and in fp32, as the trainer's are."""
        tokens, active, count = x_T_E.shape[0], mlp.config.active, mlp.config.count
        normed_T_E = self.normed(x_T_E, norm_E)
        chosen_T_C = torch.empty(tokens, active, dtype=torch.int32, device=x_T_E.device)
        weight_T_C = torch.empty(tokens, active, device=x_T_E.device)
        logits_T_X = fp32_logits(normed_T_E, mlp.router_E_X)
        self.kernels.choose(logits_T_X, mlp.config.renormalized, chosen_T_C, weight_T_C)
        if record is not None:
            record(chosen_T_C)
        rows = SortedRows.empty(tokens, active, count, x_T_E.device, fp8=isinstance(mlp.up, Fp8Matrix))
        self.kernels.sort(chosen_T_C, count, rows)
        up_P_X = x_T_E.new_empty(rows.row_P.shape[0], 2 * mlp.config.width)
        self.kernels.expert_product(self._quantized_for(mlp.up, normed_T_E), mlp.up, rows, up_P_X, first=True)
        y_R_E = x_T_E.new_empty(rows.rows, x_T_E.shape[1])
        self.kernels.expert_product(self._gated_for(mlp.down, up_P_X), mlp.down, rows, y_R_E, first=False)
        self.kernels.add_weighted(y_R_E, weight_T_C, x_T_E)

    def _record(self, routes_X_S_C: Tensor, queries: Sequence[Queries], chosen_T_C: Tensor) -> None:
        for part, chosen in zip(queries, chosen_T_C.split([part.tokens for part in queries]), strict=True):
            self.kernels.store_routes(chosen, routes_X_S_C, part)

    def _gated_for(self, down: Matrix, gate_up_T_X: Tensor) -> Input:
        """silu(gate) * up, as the matrix behind it wants it."""
        tokens, width = gate_up_T_X.shape[0], gate_up_T_X.shape[1] // 2
        if isinstance(down, Fp8Matrix):
            codes = Codes.empty(tokens, width, gate_up_T_X.device)
            self.kernels.gated_quantized(gate_up_T_X, codes, self._power_of_two)
            return codes
        y_T_F = gate_up_T_X.new_empty(tokens, width)
        self.kernels.gated(gate_up_T_X, y_T_F)
        return y_T_F

    def logits(self, hidden_T_E: Tensor) -> Tensor:
        return fp32_logits(hidden_T_E, self.head_E_V)

    def normed(self, x_T_E: Tensor, weight_E: Tensor) -> Tensor:
        out_T_E = torch.empty_like(x_T_E)
        self.kernels.rms_norm(x_T_E, weight_E, self._eps, out_T_E)
        return out_T_E

    def normed_for(self, matrix: Matrix, x_T_E: Tensor, weight_E: Tensor) -> Input:
        """As the matrix wants it."""
        if not isinstance(matrix, Fp8Matrix):
            return self.normed(x_T_E, weight_E)
        codes = Codes.of(x_T_E)
        self.kernels.rms_norm_quantized(x_T_E, weight_E, self._eps, codes, self._power_of_two)
        return codes

    def embedded(self, tokens: Sequence[Tensor], sampled: Tensor) -> Tensor:
        counts = [part.shape[0] for part in tokens]
        x_T_E = self.embedding_V_E.new_empty(sum(counts), self.embedding_V_E.shape[1])
        for part, x in zip(tokens, x_T_E.split(counts), strict=True):
            self.kernels.embed(part, sampled, self.embedding_V_E, x)
        return x_T_E

    def attention(
        self, block: Block, x: Input, queries: Sequence[Queries], wanted: Sequence[Queries], kv: Kv
    ) -> Tensor:
        """Of those wanted, which come first."""
        parts = self.store(block, x, queries, kv)  # all keys before any query: parts may be of the same row
        counts = [part.tokens for part in wanted]
        out_T_X = parts[0].new_empty(sum(counts), self.heads.queries * self.heads.dim)
        for part, qkv, out in zip(wanted, parts, out_T_X.split(counts), strict=False):
            self.kernels.attend(qkv, kv, self.heads, part, out)
        return out_T_X

    def store(self, block: Block, x: Input, queries: Sequence[Queries], kv: Kv) -> Sequence[Tensor]:
        """Write keys and values, and return what attention goes on with."""
        parts = self._product(x, block.qkv, block.qkv_bias).split([part.tokens for part in queries])
        for part, qkv in zip(queries, parts, strict=True):
            self.kernels.rotate_and_store(qkv, self._turns_2_L_C, block.qk_norm, self._eps, kv, self.heads, part)
        return parts

    def product_gauge(self, x_T_I: Tensor, matrix: Fp8Matrix) -> Tensor:
        """A product as decoding makes it, in fp32."""
        codes = self._quantized_for(matrix, x_T_I)
        assert isinstance(codes, Codes)
        out_T_O = x_T_I.new_empty(x_T_I.shape[0], matrix.values_O_I.shape[0], dtype=torch.float32)
        self.kernels.fp8_product(codes, matrix, None, None, out_T_O)
        return out_T_O

    def _quantized_for(self, matrix: Matrix, x_T_I: Tensor) -> Input:
        if not isinstance(matrix, Fp8Matrix):
            return x_T_I
        codes = Codes.of(x_T_I)
        self.kernels.quantize(x_T_I, codes, self._power_of_two)
        return codes

    def _product(self, x: Input, matrix: Matrix, bias: Tensor | None) -> Tensor:
        if isinstance(matrix, Fp8Matrix):
            assert isinstance(x, Codes)
            out_T_O = self.embedding_V_E.new_empty(x.values_T_I.shape[0], matrix.values_O_I.shape[0])
            self.kernels.fp8_product(x, matrix, bias, None, out_T_O)
            return out_T_O
        assert isinstance(x, Tensor)
        return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)

    def _add_product(self, x_T_E: Tensor, y: Input, matrix: Matrix, bias: Tensor | None) -> None:
        """In place, as part of the product: the residual stream is rounded once."""
        if isinstance(matrix, Fp8Matrix):
            assert isinstance(y, Codes)
            self.kernels.fp8_product(y, matrix, bias, x_T_E, x_T_E)
            return
        assert isinstance(y, Tensor)
        x_T_E.addmm_(y, matrix)
        if bias is not None:
            x_T_E.add_(bias)


def fp32_logits(hidden_T_E: Tensor, output_E_V: Tensor) -> Tensor:
    if hidden_T_E.dtype == torch.float32:
        return torch.mm(hidden_T_E, output_E_V)
    if not hidden_T_E.is_cuda:  # torch has no wider product there
        return torch.mm(hidden_T_E.float(), output_E_V.float())
    return torch.mm(hidden_T_E, output_E_V, out_dtype=torch.float32)


def _linear(named: Named, name: str) -> tuple[Matrix, Tensor | None]:
    weight = named[f"{name}.weight"]
    return weight.t() if isinstance(weight, Tensor) else weight, _optional(named, f"{name}.bias")


def _optional(named: Named, name: str) -> Tensor | None:
    found = named.get(name)
    assert not isinstance(found, Fp8Matrix)
    return found
