"""One decoder for Llama, Qwen2, Qwen3 and Qwen3-MoE, shared by the trainer and the native engine.

It works on flat tokens: samples lie one behind the other and only attention knows where one ends. Attention is a
callback, so training passes one over packed samples (`asyncrl.models.packed`) and the engine one over its cache.
Projections that read the same input are fused; Hugging Face names are views into the fused storage
(`asyncrl.models.names`).

The computation is a plain function of tensors (`LayerTensors`). Modules only own the parameters: calling one costs
more than multiplying a small batch, so the engine gathers the tensors once (`Layer.tensors`) and decodes with them.

Axis suffixes: T tokens, H query heads, K key/value heads, A all H+K heads that are rotated, D head dimension,
E hidden size, F width of the gated layer, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from asyncrl.config.trainer import PROJECTIONS, Lora, check_targets
from asyncrl.models.adapters import EVERY, UNCHANGED, Adapter, Adapters, Changes, LowRank, changed
from asyncrl.models.config import ATTENTION, Experts, ModelConfig, projection_shapes
from asyncrl.models.experts import ExpertTensors, Route
from asyncrl.models.layers import (
    Attend,
    Exchange,
    Indices,
    NormScale,
    Rotate,
    Rotation,
    computed_rotation,
    rms_norm,
    signed_frequencies,
)
from asyncrl.models.names import Part
from asyncrl.models.packed import attention_for
from asyncrl.models.policy import Adapted, PolicyModel, Taps

if TYPE_CHECKING:
    from asyncrl.models.execution import Execution
    from asyncrl.models.expert_parallel import ExpertGroup


class LayerTensors(NamedTuple):
    """What one layer computes with. Matrices are inputs by outputs, the transpose of how checkpoints hold them."""

    heads: int
    kv_heads: int
    head_dim: int
    input_norm: NormScale
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: NormScale | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: NormScale
    mlp: "GatedTensors | ExpertTensors"
    changes: Changes = UNCHANGED
    """Low-rank ones to the four matrices."""

    def forward(self, x_T_E: Tensor, rotate: Rotate, layer: int, attend: Attend, route: Route | None = None) -> Tensor:
        y_T_X = attend(layer, *self.heads_of(rms_norm(x_T_E, self.input_norm), rotate))
        return self.after_attention(x_T_E, y_T_X, layer, route)

    def heads_of(self, x_T_E: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of states that are normalised."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv_T_X = changed(_project(x_T_E, self.qkv, self.qkv_bias), x_T_E, self.changes.qkv)
        qkv_T_X_D = qkv_T_X.view(-1, heads + 2 * kv_heads, self.head_dim)
        qk_T_A_D, v_T_K_D = torch.split_with_sizes(qkv_T_X_D, (heads + kv_heads, kv_heads), 1)
        if self.qk_norm is not None:
            qk_T_A_D = rms_norm(qk_T_A_D, self.qk_norm)
        q_T_H_D, k_T_K_D = torch.split_with_sizes(rotate(qk_T_A_D), (heads, kv_heads), 1)
        return q_T_H_D, k_T_K_D, v_T_K_D

    def after_attention(self, x_T_E: Tensor, y_T_X: Tensor, layer: int = 0, route: Route | None = None) -> Tensor:
        """`x_T_E` is the layer's input and `y_T_X` what attention made of it, perhaps for the first tokens only."""
        if y_T_X.shape[0] < x_T_E.shape[0]:
            x_T_E = x_T_E[: y_T_X.shape[0]]
        x_T_E = changed(add_projection(x_T_E, y_T_X, self.out, self.out_bias), y_T_X, self.changes.out)
        normed_T_E = rms_norm(x_T_E, self.mlp_norm)
        if isinstance(self.mlp, ExpertTensors):
            return x_T_E + self.mlp.forward(normed_T_E, layer, route, changes=self.changes)
        y_T_F = self.mlp.gated(normed_T_E, self.changes.gate_up)
        return changed(self.mlp.add_down(x_T_E, y_T_F), y_T_F, self.changes.down)


class GatedTensors(NamedTuple):
    """The gated layer of a dense model."""

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def gated(self, x_T_E: Tensor, change: LowRank | None = None) -> Tensor:
        gate_up = changed(_project(x_T_E, self.gate_up, self.gate_up_bias), x_T_E, change)
        width = gate_up.shape[1] // 2
        gate_T_F, up_T_F = torch.split_with_sizes(gate_up, (width, width), 1)
        return F.silu(gate_T_F) * up_T_F

    def add_down(self, x_T_E: Tensor, y_T_F: Tensor) -> Tensor:
        return add_projection(x_T_E, y_T_F, self.down, self.down_bias)


def _project(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def add_projection(x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """x plus the projection of y: one operation where there is no bias, and in fp32 where only x is."""
    if y.dtype != x.dtype:  # under autocast, which would round x in that one operation
        return x + _project(y, matrix, bias)
    out = torch.addmm(x, y, matrix)
    return out if bias is None else out + bias


class Tensors(NamedTuple):
    """What a whole decoder computes with."""

    embedding_V_E: Tensor
    rotation: Rotation
    layers: Iterable[Callable[[Tensor, Rotate, int, Attend, Route | None], Tensor]]
    norm: NormScale

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        taps: Taps | None = None,
        route: Route | None = None,
    ) -> Tensor:
        """Final hidden states, normalised and ready for the output matrix."""
        x_T_E = F.embedding(tokens_T, self.embedding_V_E)
        if torch.is_autocast_enabled(x_T_E.device.type):
            x_T_E = x_T_E.float()  # narrow products, but a residual stream that nothing rounds
        rotate = self.rotation(positions_T)
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.see(index, x_T_E)
            x_T_E = layer(x_T_E, rotate, index, attend, route)
        return rms_norm(x_T_E, self.norm)


def plain_linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    """Without torch's random weights, which take longer to draw than real ones to load."""
    return cast(nn.Linear, skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=dtype))


class ExpertMixture(nn.Module):
    """Owns the experts of a layer. Their matrices lie one below the other, so that each is a view of some rows."""

    def __init__(self, experts: Experts, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = experts
        self.router = nn.Parameter(torch.empty(experts.count, hidden, dtype=dtype))
        self.gate_up = nn.Parameter(torch.empty(experts.count * 2 * experts.width, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts.count * hidden, experts.width, dtype=dtype))
        self.group: ExpertGroup | None = None
        """Ranks that share the experts, if they do: `gate_up` and `down` then are sharded."""

    def tensors(self) -> ExpertTensors:
        experts, hidden = self.config, self.router.shape[1]
        gate_up, down = self.gate_up, self.down
        if self.group is not None:
            gate_up, down = self.group.kept(gate_up), self.group.kept(down)
        return ExpertTensors(
            router_E_X=self.router.t(),
            gate_up_X_E_F=gate_up.view(-1, 2 * experts.width, hidden).transpose(1, 2),
            down_X_F_E=down.view(-1, hidden, experts.width).transpose(1, 2),
            active=experts.active,
            renormalized=experts.renormalized,
            group=self.group,
        )


class Layer(nn.Module):
    head_kind_A: Tensor

    def __init__(self, cfg: ModelConfig, dtype: torch.dtype, index: int = 0) -> None:
        super().__init__()
        self.config = cfg
        hidden, wide = cfg.hidden_size, cfg.intermediate_size
        qkv_width = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
        self.input_norm = nn.Parameter(torch.ones(hidden, dtype=dtype))
        self.qkv_proj = plain_linear(hidden, qkv_width, cfg.qkv_bias, dtype)
        self.qk_norm = nn.Parameter(torch.ones(2, cfg.head_dim, dtype=dtype)) if cfg.qk_norm else None
        self.o_proj = plain_linear(cfg.heads * cfg.head_dim, hidden, cfg.out_bias, dtype)
        self.mlp_norm = nn.Parameter(torch.ones(hidden, dtype=dtype))
        experts = cfg.experts_of(index)
        self.experts = None if experts is None else ExpertMixture(experts, hidden, dtype)
        if experts is None:
            self.gate_up_proj = plain_linear(hidden, 2 * wide, cfg.mlp_bias, dtype)
            self.down_proj = plain_linear(wide, hidden, cfg.mlp_bias, dtype)
        self.adapters: Adapters | None = None
        self.register_buffer("head_kind_A", torch.tensor([0] * cfg.heads + [1] * cfg.kv_heads), persistent=False)

    def tensors(self) -> LayerTensors:
        cfg = self.config
        return LayerTensors(
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            input_norm=NormScale.of(self.input_norm, cfg.norm_eps),
            qkv=self.qkv_proj.weight.t(),
            qkv_bias=self.qkv_proj.bias,
            qk_norm=None if self.qk_norm is None else NormScale.of(self.qk_norm[self.head_kind_A], cfg.norm_eps),
            out=self.o_proj.weight.t(),
            out_bias=self.o_proj.bias,
            mlp_norm=NormScale.of(self.mlp_norm, cfg.norm_eps),
            mlp=self._gated() if self.experts is None else self.experts.tensors(),
            changes=UNCHANGED if self.adapters is None else self.adapters.changes(),
        )

    def _gated(self) -> GatedTensors:
        up, down = self.gate_up_proj, self.down_proj
        return GatedTensors(up.weight.t(), up.bias, down.weight.t(), down.bias)

    def forward(
        self,
        x_T_E: Tensor,
        rotate: Rotate,
        layer: int,
        attend: Attend,
        route: Route | None = None,
        run: "LayerForward | None" = None,
    ) -> Tensor:
        return (run or keeping)(self, x_T_E, rotate, layer, attend, route)


LayerForward = Callable[[Layer, Tensor, Rotate, int, Attend, Route | None], Tensor]
"""One way to run a layer. It is called inside the module, so that hooks of the module (FSDP's) come before it."""


def keeping(
    layer: Layer, x_T_E: Tensor, rotate: Rotate, index: int, attend: Attend, route: Route | None = None
) -> Tensor:
    """What autograd wants is kept for the backward."""
    return layer.tensors().forward(x_T_E, rotate, index, attend, route)


class Decoder(PolicyModel):
    """Weights are uninitialised: `asyncrl.models.checkpoint` loads them or draws random ones."""

    def __init__(self, cfg: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = cfg
        self.embed_tokens = cast(nn.Embedding, skip_init(nn.Embedding, cfg.vocabulary, cfg.hidden_size, dtype=dtype))
        self.layers = nn.ModuleList(Layer(cfg, dtype, index) for index in range(cfg.layers))
        self.norm = nn.Parameter(torch.ones(cfg.hidden_size, dtype=dtype))
        self.lm_head = None
        if not cfg.tied_embeddings:
            self.lm_head = plain_linear(cfg.hidden_size, cfg.vocabulary, False, dtype)
        self.frequencies_D = signed_frequencies(cfg.rope, cfg.head_dim)

    def blocks(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        taps: Taps | None = None,
        *,
        run: Callable[[int], LayerForward] = lambda _: keeping,
        route: Route | None = None,
    ) -> Tensor:
        """Final hidden states, normalised and ready for `logits`. `run` is how the layer of a number is computed, and
        `route` names the experts of each token, if not the router's scores."""
        rotation = computed_rotation(self.frequencies_D, self.norm.dtype)
        norm = NormScale.of(self.norm, self.config.norm_eps)
        layers = [partial(layer, run=run(index)) for index, layer in enumerate(self.layers)]
        tensors = Tensors(self.embed_tokens.weight, rotation, layers, norm)
        return tensors.forward(tokens_T, positions_T, attend, taps, route)

    def states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows: Sequence[Indices],
        *,
        narrow: bool,
        taps: Taps | None = None,
        execution: "Execution | None" = None,
        route: Route | None = None,
        exchange: Exchange | None = None,
    ) -> Tensor:
        attend = attention_for(rows, tokens_T.device, narrow=narrow)
        if exchange is not None:
            attend = exchange(attend)
        if execution is None:
            return self(tokens_T, positions_T, attend, taps, route=route)
        return self(tokens_T, positions_T, attend, taps, run=execution.layer, route=route)

    @property
    def output_matrix(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.device

    def parts(self) -> Iterator[tuple[str, tuple[Part, ...]]]:
        cfg = self.config
        yield "embed_tokens.weight", (Part("model.embed_tokens.weight", cfg.vocabulary),)
        for index, layer in enumerate(self.blocks()):
            for name, parts in _parts(layer):
                yield f"layers.{index}.{name}", tuple(p._replace(name=f"model.layers.{index}.{p.name}") for p in parts)
        yield "norm", (Part("model.norm.weight", cfg.hidden_size),)
        if self.lm_head is not None:
            yield "lm_head.weight", (Part("lm_head.weight", cfg.vocabulary),)

    def redundant(self, name: str) -> bool:
        """Tensors that some writers add although they follow from others."""
        return name.endswith(".rotary_emb.inv_freq") or (self.config.tied_embeddings and name == "lm_head.weight")

    def adapt(self, settings: Lora, generator: torch.Generator) -> None:
        check_targets(settings, PROJECTIONS, self.config.family)
        for index, layer in enumerate(self.blocks()):
            shapes, experts = projection_shapes(self.config, index), self.config.experts_of(index)
            count = None if experts is None else experts.count
            adapters = Adapters(shapes, settings.targets, settings.rank, settings.alpha, generator, count)
            layer.adapters = adapters.to(layer.input_norm.device)

    def adapted(self) -> Iterator[Adapted]:
        for index, layer in enumerate(self.blocks()):
            for name, module in layer.adapters.of.items() if layer.adapters is not None else ():
                adapter = cast(Adapter, module)
                gated = "mlp" if adapter.experts is None else f"mlp.experts.{EVERY}"
                part = "self_attn" if name in ATTENTION else gated
                yield Adapted(f"model.layers.{index}.{part}.{name}", f"layers.{index}.adapters.of.{name}", adapter)

    def place(self, device: torch.device) -> None:
        self.frequencies_D = self.frequencies_D.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Not a buffer: positions need fp32 frequencies whatever dtype the weights are cast to.
        super()._apply(fn, recurse)
        self.place(self.norm.device)
        return self


def _parts(layer: Layer) -> Iterator[tuple[str, tuple[Part, ...]]]:
    cfg = layer.config
    query, key = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    yield "input_norm", (Part("input_layernorm.weight", cfg.hidden_size),)
    yield from _linear("qkv_proj", layer.qkv_proj, "self_attn", {"q_proj": query, "k_proj": key, "v_proj": key})
    yield from _linear("o_proj", layer.o_proj, "self_attn", {"o_proj": cfg.hidden_size})
    if layer.qk_norm is not None:
        yield "qk_norm", tuple(Part(f"self_attn.{kind}_norm.weight", 1, flat=True) for kind in "qk")
    yield "mlp_norm", (Part("post_attention_layernorm.weight", cfg.hidden_size),)
    if layer.experts is None:
        gated = {"gate_proj": cfg.intermediate_size, "up_proj": cfg.intermediate_size}
        yield from _linear("gate_up_proj", layer.gate_up_proj, "mlp", gated)
        yield from _linear("down_proj", layer.down_proj, "mlp", {"down_proj": cfg.hidden_size})
    else:
        experts = layer.experts.config
        names = [f"mlp.experts.{number}" for number in range(experts.count)]
        both = [Part(f"{name}.{kind}_proj.weight", experts.width) for name in names for kind in ("gate", "up")]
        yield "experts.router", (Part("mlp.gate.weight", experts.count),)
        yield "experts.gate_up", tuple(both)
        yield "experts.down", tuple(Part(f"{name}.down_proj.weight", cfg.hidden_size) for name in names)


def _linear(own: str, fused: nn.Linear, prefix: str, rows: dict[str, int]) -> Iterator[tuple[str, tuple[Part, ...]]]:
    for kind, _ in fused.named_parameters():  # weight and, where there is one, bias
        yield f"{own}.{kind}", tuple(Part(f"{prefix}.{name}.{kind}", count) for name, count in rows.items())
