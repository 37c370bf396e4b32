"""Tiny random checkpoints of families that our own decoder does not know, written by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support.tiny_model import SHAPE, save_random

WINDOW = {"sliding_window": 8}
"""Shorter than the answers of the tests."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Three layers with gated delta nets, and one with attention."""
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
SCALES = {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.3}
GPT2 = {"vocab_size": 48, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3TextConfig", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3_next": ("Qwen3NextConfig", DELTA | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}),
    "gemma2": ("Gemma2Config", WINDOW),
    "mistral": ("MistralConfig", WINDOW),
    "phi3": ("Phi3Config", {}),
    "gpt_oss": ("GptOssConfig", WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "glm4": ("Glm4Config", {}),
    "glm4_moe": ("Glm4MoeConfig", EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", SCALES),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"num_experts": 8}),
    "cohere": ("CohereConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "gpt2": ("GPT2Config", GPT2),
}
"""The class of their config, and what sets them apart."""


def family_config(family: str, **changes: Any) -> PreTrainedConfig:
    name, own = FAMILIES[family]
    make: Callable[..., PreTrainedConfig] = getattr(transformers, name)
    shape = {"bos_token_id": None, "eos_token_id": None} if family == "gpt2" else SHAPE | {"head_dim": 32}
    return make(**shape | {"pad_token_id": None} | own | changes)


def family_checkpoint(directory: Path, family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    return save_random(family_config(family, **changes), directory, seed)
