"""What a Hugging Face `config.json` says about a model: for our decoder, or for sums about one of transformers.

For our decoder every field that changes the computation is either understood here or refused: a model that loads is the
model that transformers would run. Of other models transformers' own classes know what they compute. Here are only their
sizes, as far as configs of different families agree on names for them.
"""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec

from asyncrl.config.run import Backend, WarmStart
from asyncrl.errors import CheckpointError
from asyncrl.models.architectures import architecture
from asyncrl.models.files import tensor_sizes
from asyncrl.models.outline import read_raw

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The matrices that every layer has once, whatever is behind them."""
GATED = ("gate_proj", "up_proj", "down_proj")
"""Those that every layer has once, or once for each expert."""
OUTPUTS = ("lm_head.weight", "embed_out.weight")
"""How names of output matrices end."""
RopeType = Literal["default", "linear", "llama3"]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base and, for stretched contexts, how the frequencies are scaled."""

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of the gated layer."""

    count: int
    active: int
    """Of a token."""
    width: int
    """Of the gated layer of each."""
    renormalized: bool
    """The weights of the chosen ones add up to 1."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with one gated layer of `intermediate_size` instead."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder. `raw` is the whole `config.json`, kept so that saving gives it back."""

    family: str
    """`model_type`; of our decoder, one of `Family`."""
    vocabulary: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope
    initializer_range: float
    raw: dict[str, Any]
    experts: Experts | None = None
    backend: Literal["native", "transformers"] = "native"
    """Whose code computes it in training."""
    parameters: int = 0
    """As many numbers as the files hold, for `transformers`; 0: they follow from the other sizes."""

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.family] + "ForCausalLM" if self.backend == "native" else architecture(self.family)

    def experts_of(self, layer: int) -> Experts | None:
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def without_output(self) -> "ModelConfig":
        """The same decoder without an output matrix of its own, for uses that end at the hidden states."""
        left_out = self.parameters and not self.tied_embeddings and self.vocabulary * self.hidden_size
        return msgspec.structs.replace(self, tied_embeddings=True, parameters=self.parameters - left_out)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        family = _choice(raw, "model_type", get_args(Family))
        _refuse_unsupported(raw)
        heads = _size(raw, "num_attention_heads")
        hidden = _size(raw, "hidden_size")
        kv_heads = _size(raw, "num_key_value_heads") if raw.get("num_key_value_heads") is not None else heads
        head_dim = raw.get("head_dim") or (128 if family in ("qwen3", "qwen3_moe") else hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise CheckpointError(
                f"config.json: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}, "
                f"and head_dim={head_dim} must be even"
            )
        bias = bool(raw.get("attention_bias", False))
        return cls(
            family=family,
            vocabulary=_size(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(raw, "intermediate_size"),
            layers=_size(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bias,
            out_bias=family != "qwen2" and bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            rope=_rope(raw),
            initializer_range=raw.get("initializer_range", 0.02),
            raw=dict(raw),
            experts=_experts(raw) if family == "qwen3_moe" else None,
        )

    @classmethod
    def from_transformers(cls, raw: Mapping[str, Any], tensors: Mapping[str, int]) -> "ModelConfig":
        """Of any family that transformers knows; `tensors` are the sizes of those in the files."""
        family = str(raw.get("model_type"))
        architecture(family)
        if raw.get("quantization_config"):
            raise CheckpointError("quantization_config is set; use a checkpoint in fp32, fp16 or bf16")
        text = cast(dict[str, Any], raw.get("text_config") or raw)
        hidden, heads = _first(text, "hidden_size", "n_embd", "d_model"), _first(text, "num_attention_heads", "n_head")
        wide = _first(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        return cls(
            family=family,
            vocabulary=_size(text, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=wide,
            layers=_first(text, "num_hidden_layers", "n_layer", "num_layers"),
            heads=heads,
            kv_heads=_first(text, "num_key_value_heads", default=heads),
            head_dim=_first(text, "head_dim", default=max(1, hidden // heads)),
            norm_eps=1e-6,
            # Families differ in what a config that does not say means.
            tied_embeddings=not any(name.endswith(OUTPUTS) for name in tensors),
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            qk_norm=False,
            rope=Rope(),
            initializer_range=0.02,
            raw=dict(raw),
            experts=_any_experts(text, wide),
            backend="transformers",
            parameters=sum(tensors.values()),
        )


def read_config(directory: Path, backend: Backend = "native") -> ModelConfig:
    """Read `config.json` of a Hugging Face model directory. `auto` takes our decoder for what it can compute."""
    raw = read_raw(directory)
    try:
        return _read(raw, directory, backend)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None


def runs_natively(directory: Path) -> bool:
    """Whether our decoder computes this model, as far as its config says; what is no model is refused elsewhere."""
    try:
        read_config(directory)
    except CheckpointError:
        return not (directory / "config.json").is_file()
    return True


def _read(raw: Mapping[str, Any], directory: Path, backend: Backend) -> ModelConfig:
    if backend == "transformers":
        return ModelConfig.from_transformers(raw, tensor_sizes(directory))
    try:
        return ModelConfig.from_hf(raw)
    except CheckpointError as why_not:
        if backend == "native":
            raise
        try:
            return ModelConfig.from_transformers(raw, tensor_sizes(directory))
        except CheckpointError as neither:
            known = raw.get("model_type") in get_args(Family)
            raise (why_not if known else neither) from None


def warm_start_shape(settings: WarmStart, vocabulary: int) -> dict[str, Any]:
    """What `config.json` says about the size of a model that is made on the spot."""
    experts = {
        "num_experts": settings.experts,
        "num_experts_per_tok": settings.active_experts,
        "moe_intermediate_size": settings.expert_size,
        "norm_topk_prob": True,
    }
    return {
        "model_type": "qwen3_moe" if settings.experts else "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.hidden_size // settings.heads,
        "tie_word_embeddings": True,
        **(experts if settings.experts else {}),
    }


def projection_shapes(cfg: ModelConfig, layer: int = 0) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices of a layer, by their Hugging Face names; of experts, those that each has."""
    hidden, heads, kv = cfg.hidden_size, cfg.heads, cfg.kv_heads
    experts = cfg.experts_of(layer)
    wide = cfg.intermediate_size if experts is None else experts.width
    return {
        "q_proj": (heads * cfg.head_dim, hidden),
        "k_proj": (kv * cfg.head_dim, hidden),
        "v_proj": (kv * cfg.head_dim, hidden),
        "o_proj": (hidden, heads * cfg.head_dim),
        "gate_proj": (wide, hidden),
        "up_proj": (wide, hidden),
        "down_proj": (hidden, wide),
    }


def matrices(cfg: ModelConfig, layer: int, names: Container[str]) -> list[tuple[int, int]]:
    """Outputs and inputs of all that have one of these names: of experts, as many as there are experts."""
    experts = cfg.experts_of(layer)
    copies = 1 if experts is None else experts.count
    shapes = projection_shapes(cfg, layer)
    return [
        shape for name in shapes if name in names for shape in [shapes[name]] * (1 if name in ATTENTION else copies)
    ]


def _experts(raw: Mapping[str, Any]) -> Experts:
    written_by_transformers_5 = "num_local_experts" in raw
    count = _size(raw, "num_local_experts" if written_by_transformers_5 else "num_experts")
    active = _size(raw, "num_experts_per_tok")
    if active > count:
        raise CheckpointError(f"num_experts_per_tok={active} is more than num_experts={count}")
    every = raw.get("decoder_sparse_step", 1)
    layers = range(_size(raw, "num_hidden_layers"))
    listed = raw.get("mlp_only_layers") or ()
    return Experts(
        count=count,
        active=active,
        width=_size(raw, "moe_intermediate_size"),
        renormalized=bool(raw.get("norm_topk_prob", False)),
        dense_layers=frozenset(layer for layer in layers if layer in listed or (layer + 1) % every),
    )


def _any_experts(text: Mapping[str, Any], wide: int) -> Experts | None:
    count = _first(text, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    if not count:
        return None
    active = _first(text, "num_experts_per_tok", "num_experts_per_token", default=1)
    width = _first(text, "moe_intermediate_size", default=wide)
    return Experts(count=count, active=active, width=width, renormalized=False)


def _first(raw: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of these that is there."""
    for key in keys:
        if isinstance(value := raw.get(key), int) and value > 0:
            return value
    if default is None:
        raise CheckpointError(f"{keys[0]}={raw.get(keys[0])!r} must be a positive integer")
    return default


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key}={value!r} must be a positive integer")
    return value


def _choice(raw: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> Any:
    value = raw.get(key)
    if value not in allowed:
        raise CheckpointError(f"{key}={value!r} is not supported; use one of {', '.join(allowed)}")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act={raw['hidden_act']!r} is not supported; only silu is")
    if raw.get("quantization_config"):
        raise CheckpointError("quantization_config is set; use a checkpoint in fp32, fp16 or bf16")
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    reaches = window is not None and raw.get("max_position_embeddings", window + 1) > window
    slides = "sliding_attention" in raw["layer_types"] if raw.get("layer_types") else _has_window_layers(raw)
    if reaches and slides:
        raise CheckpointError(
            f"sliding_window={window} is shorter than max_position_embeddings and sliding-window attention is not "
            f"supported; set use_sliding_window to false or max_position_embeddings to {window}"
        )


def _has_window_layers(raw: Mapping[str, Any]) -> bool:
    return raw.get("max_window_layers", 28) < raw.get("num_hidden_layers", 0)


def _rope(raw: Mapping[str, Any]) -> Rope:
    """Both layouts: `rope_theta` with `rope_scaling`, and the one `rope_parameters` of transformers 5."""
    parameters = cast(dict[str, Any], raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = {"rope_type": parameters.get("rope_type", parameters.get("type", "default"))}
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"partial_rotary_factor={partial} is not supported; only 1.0 is")
    positions = parameters.get("original_max_position_embeddings", raw.get("max_position_embeddings", 0))
    return Rope(
        type=_choice(kind, "rope_type", get_args(RopeType)),
        theta=float(parameters.get("rope_theta", raw.get("rope_theta", 10_000.0))),
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_positions=int(positions),
    )
