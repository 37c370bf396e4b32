"""Drafting heads as directories that vLLM loads: config.json and model.safetensors.

vLLM shares the target's embedding, and for EAGLE its output matrix, with a head that does not bring its own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.config.drafter import HeadDrafter
from asyncrl.drafting.heads import Head, HeadConfig, Kind, default_taps
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.models.config import ModelConfig
from asyncrl.models.files import WEIGHTS
from asyncrl.system.storage import storing

ARCHITECTURES: dict[Kind, str] = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
"""vLLM writes `Eagle` before the first one by itself."""
OF_TARGET = ("d2t", "t2d", "embed_tokens.weight", "model.embed_tokens.weight")
"""Found in heads of others besides their weights: maps, which are read apart, and a copy of the target's embedding."""
SIZES = {
    "vocab_size": "vocabulary",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
}
"""What a head shares with its target: the field of config.json, and ours."""
KEPT_OF_TARGET = ("max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta")
"""A head with fewer positions than its target would draft nonsense past them."""


def head_tensors(head: Head) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by the name that vLLM reads; writing into a weight writes the head."""
    cfg = head.config.target
    query, key, wide = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim, cfg.intermediate_size
    layer = "midlayer" if head.config.kind == "eagle3" else "layers.0"
    yield "fc.weight", head.fc.weight.detach()
    if head.embedding_norm is not None and head.feature_norm is not None:
        yield f"{layer}.input_layernorm.weight", head.embedding_norm.detach()
        yield f"{layer}.hidden_norm.weight", head.feature_norm.detach()
    for name, part in zip("qkv", head.qkv_proj.weight.detach().split([query, key, key]), strict=True):
        yield f"{layer}.self_attn.{name}_proj.weight", part
    yield f"{layer}.self_attn.o_proj.weight", head.o_proj.weight.detach()
    yield f"{layer}.post_attention_layernorm.weight", head.mlp_norm.detach()
    for name, part in zip(("gate", "up"), head.gate_up_proj.weight.detach().split(wide), strict=True):
        yield f"{layer}.mlp.{name}_proj.weight", part
    yield f"{layer}.mlp.down_proj.weight", head.down_proj.weight.detach()
    if head.norm is not None and head.lm_head is not None:
        yield "norm.weight", head.norm.detach()
        yield "lm_head.weight", head.lm_head.weight.detach()
    if head.drafts_U is not None:
        yield "d2t", head.drafts_U - torch.arange(len(head.drafts_U), device=head.drafts_U.device)
        yield "t2d", torch.isin(torch.arange(cfg.vocabulary, device=head.drafts_U.device), head.drafts_U)


def save_head(head: Head, directory: Path | str) -> None:
    directory = Path(directory)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in head_tensors(head)}
    with storing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(_config_of(head), indent=2, sort_keys=True) + "\n")


def load_head(directory: Path | str, target: ModelConfig, dtype: torch.dtype = torch.float32) -> Head:
    """Read a head that was made for a target of this shape."""
    directory = Path(directory)
    config = read_head_config(directory, target)
    try:
        tensors = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / WEIGHTS} cannot be read: {error}; save the head again") from None
    head = Head(config, dtype)
    if "d2t" in tensors:
        head.drafts_U = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    _fill(directory, head, {name: tensor for name, tensor in tensors.items() if name not in OF_TARGET})
    return head


def head_config(drafter: HeadDrafter, target: ModelConfig) -> HeadConfig:
    """The shape of a fresh head."""
    wanted = drafter.vocabulary or target.vocabulary
    if wanted > target.vocabulary:
        raise ConfigError(
            f"drafter.draft_vocabulary={wanted} is more than the model's vocabulary of {target.vocabulary} tokens; "
            f"0 means all of them"
        )
    taps = () if drafter.uses_target_output else default_taps(target.layers)
    return HeadConfig(kind=drafter.architecture, target=target, taps=taps, vocabulary=wanted)


def fresh_head(
    drafter: HeadDrafter,
    target: ModelConfig,
    seed: int,
    counts_V: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Head:
    """A head that has to learn everything. `counts_V` says how frequent each token is, for a reduced vocabulary."""
    config = head_config(drafter, target)
    head = Head(config, dtype)
    head.initialise(seed)
    if config.vocabulary < target.vocabulary:
        if counts_V is None:
            raise ConfigError(
                f"drafter.draft_vocabulary={config.vocabulary} of {target.vocabulary} tokens needs to know which are "
                f"frequent, and nothing was recorded yet; leave it at 0, or warm-start a head with `asyncrl drafter "
                f"train RUN`"
            )
        head.drafts_U = counts_V.argsort(descending=True, stable=True)[: config.vocabulary].sort().values
    return head


def _config_of(head: Head) -> dict[str, Any]:
    config, target = head.config, head.config.target
    found: dict[str, Any] = {name: target.raw[name] for name in KEPT_OF_TARGET if target.raw.get(name) is not None}
    found |= {name: getattr(target, ours) for name, ours in SIZES.items()}
    found |= {
        "architectures": [ARCHITECTURES[config.kind]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": target.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.raw.get("bos_token_id"),
        "eos_token_id": target.raw.get("eos_token_id"),
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    if config.kind == "eagle3":
        found |= {
            "draft_vocab_size": config.vocabulary,
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "num_aux_hidden_states": len(config.taps),
        }
    return found


def read_head_config(directory: Path, target: ModelConfig) -> HeadConfig:
    file = directory / "config.json"
    try:
        raw: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} holds no drafting head (no config.json); `asyncrl drafter train RUN` makes one"
        ) from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}; save the head again") from None
    third = any("Eagle3" in name for name in raw.get("architectures", ()))
    for name, ours in SIZES.items():
        own, wanted = raw.get(name), getattr(target, ours)
        if own is not None and own != wanted:
            raise CheckpointError(f"{file}: {name}={own}, but the target has {wanted}; the head is another model's")
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    taps = tuple(ids) if ids else default_taps(target.layers)
    if third and not all(0 <= tap < target.layers for tap in taps):
        raise CheckpointError(
            f"{file}: eagle_aux_hidden_state_layer_ids={list(taps)} must lie below the target's {target.layers} "
            f"layers; the head is another model's"
        )
    return HeadConfig(
        kind="eagle3" if third else "eagle",
        target=target,
        taps=taps if third else (),
        vocabulary=(raw.get("draft_vocab_size") or target.vocabulary) if third else target.vocabulary,
    )


def _fill(directory: Path, head: Head, tensors: dict[str, Tensor]) -> None:
    wanted = {name: tensor for name, tensor in head_tensors(head) if name not in OF_TARGET}
    if wanted.keys() != tensors.keys():
        missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        raise CheckpointError(
            f"{directory} is no {head.config.kind} head for this model: missing {', '.join(missing) or 'nothing'}, "
            f"unexpected {', '.join(unexpected) or 'nothing'}; save the head again"
        )
    if head.config.vocabulary < head.config.target.vocabulary and head.drafts_U is None:
        raise CheckpointError(f"{directory} drafts {head.config.vocabulary} tokens but has no d2t; save the head again")
    for name, tensor in wanted.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{directory}: {name} has shape {tuple(tensors[name].shape)}, but this model's head has "
                f"{tuple(tensor.shape)}; the head is another model's"
            )
        tensor.copy_(tensors[name])
