"""Tiny random checkpoints of families that are trained through transformers, with what sets each apart switched on."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from asyncrl.models.policy import Packing
from tests.support.tiny_model import SHAPE

SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}


class Tried(NamedTuple):
    """A family, and how its samples lie in a forward."""

    config: dict[str, Any]
    title: str
    tests: str
    packing: Packing = "packed"


FAMILIES = {
    "gemma2": Tried(
        {
            "head_dim": 16,
            "sliding_window": 4,
            "final_logit_softcapping": 2.0,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
        },
        "Gemma 2",
        "sliding windows, capped logits",
    ),
    "gemma3_text": Tried({"head_dim": 16, "query_pre_attn_scalar": 16, **SLIDING}, "Gemma 3 (text)", "sliding windows"),
    "mistral": Tried({"head_dim": 16, "sliding_window": 4}, "Mistral", "sliding windows"),
    "phi3": Tried({"pad_token_id": 0}, "Phi-3, Phi-4", "fused projections"),
    "gpt_oss": Tried(
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            **SLIDING,
        },
        "gpt-oss",
        "attention sinks, experts with biases",
        "padded",
    ),
    "qwen3_next": Tried(
        {"head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS, **GATED_DELTA},
        "Qwen3-Next",
        "gated delta layers, experts",
        "padded",
    ),
    "qwen3_5_text": Tried({"head_dim": 16, **GATED_DELTA}, "Qwen3.5 (text)", "gated delta layers", "padded"),
    "glm4": Tried({"head_dim": 16, "pad_token_id": 0}, "GLM-4", "partial rotation"),
    "glm4_moe": Tried(
        {"head_dim": 16, "first_k_dense_replace": 1, **SHARED}, "GLM-4.5 to 4.7", "experts, corrected scores"
    ),
    "olmo2": Tried({"pad_token_id": 0}, "OLMo 2", "norms behind the layers"),
    "granite": Tried(
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
        "Granite 3",
        "scaled logits",
    ),
    "cohere": Tried({"logit_scale": 0.25}, "Command R", "scaled logits, parallel layers"),
    "cohere2": Tried({"logit_scale": 0.25, "head_dim": 16, **SLIDING}, "Command A", "scaled logits, sliding windows"),
    "llama": Tried({"rope_parameters": YARN}, "Llama with YaRN", "rotation that our decoder has not"),
    "mixtral": Tried({"num_local_experts": 4, "num_experts_per_tok": 2}, "Mixtral", "experts"),
    "deepseek_v3": Tried({"first_k_dense_replace": 1, **SHARED, **LATENT}, "DeepSeek-V3", "latent attention, experts"),
    "smollm3": Tried({"pad_token_id": 0}, "SmolLM3", "layers without rotation"),
    "exaone4": Tried(SLIDING, "EXAONE 4", "sliding windows"),
    "lfm2": Tried(
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64, "block_multiple_of": 8},
        "LFM2",
        "convolutions",
        "padded",
    ),
    "falcon_h1": Tried(
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "lm_head_multiplier": 0.5,
        },
        "Falcon-H1",
        "state-space layers, scaled logits",
        "padded",
    ),
}


def tiny_family(directory: Path, family: str, **changes: Any) -> PreTrainedModel:
    """Save a model of one of these families; returns it for comparison."""
    generator = torch.Generator().manual_seed(0)
    config = CONFIG_MAPPING[family](**SHAPE | FAMILIES[family].config | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name and parameter.ndim == 1 else 0.3 * noise
    for name, buffer in model.named_buffers():
        if name in model.state_dict():  # corrections of scores, which experts are chosen by
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    return model
