"""Tiny random checkpoints, written by transformers, to compare with it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

DENSE = ("llama", "qwen2", "qwen3")
FAMILIES = (*DENSE, "qwen3_moe")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Each family with everything that sets it apart switched on."""
    own: dict[str, Any]
    if family == "llama":
        own = {"attention_bias": True, "mlp_bias": True, "rope_parameters": dict(LLAMA3_ROPE)}
        return LlamaConfig(**SHAPE | own | changes)
    if family == "qwen2":
        return Qwen2Config(**SHAPE | {"tie_word_embeddings": True} | changes)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**SHAPE | {"head_dim": 32} | EXPERTS | changes)
    return Qwen3Config(**SHAPE | {"head_dim": 32} | changes)


def tiny_checkpoint(directory: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Save a model of a family that our decoder knows; returns it for comparison."""
    return save_random(tiny_config(family, **changes), directory, seed)


def save_random(config: PreTrainedConfig, directory: Path, seed: int) -> PreTrainedModel:
    """With weights of a size that makes tokens unevenly likely."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name else 0.3 * noise
    model.save_pretrained(directory)
    return model


def tiny_eagle3(directory: Path, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Save a random EAGLE-3 head for the tiny Qwen3 model, in the layout that vLLM loads; returns its tensors."""
    hidden, wide, heads, kv_heads, dim, vocabulary = 32, 64, 4, 2, 32, 48
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * dim),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if "norm" in name else 0.3 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": 1, "head_dim": dim, "draft_vocab_size": vocabulary})
    config.architectures = ["LlamaForCausalLMEagle3"]
    config.eagle_aux_hidden_state_layer_ids = [0, 1]  # vLLM's default of three layers needs a deeper target
    config.num_aux_hidden_states = 2
    config.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""The config of a real model, for sums about its size."""
