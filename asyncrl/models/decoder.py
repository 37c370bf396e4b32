"""One decoder for Llama, Qwen2 and Qwen3, shared by the trainer and the native engine.

It works on flat tokens: samples lie one behind the other and only attention knows where one ends. Attention is a
callback, so training passes one over packed samples (`asyncrl.models.packed`) and the engine one over its cache.
Projections that read the same input are fused; Hugging Face names are views into the fused storage (`hf_tensors`).

Axis suffixes: T tokens, H query heads, K key/value heads, D head dimension, E hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from asyncrl.models.config import ModelConfig
from asyncrl.models.rope import rotate, rotation, signed_frequencies

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_T_H_D, k_T_K_D, v_T_K_D) -> out_T_H_D."""


class Attention(nn.Module):
    head_kind_A: Tensor

    def __init__(self, cfg: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.eps = cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.norm_eps
        width = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
        self.qkv_proj = skip_init(nn.Linear, cfg.hidden_size, width, bias=cfg.qkv_bias, dtype=dtype)
        self.o_proj = skip_init(nn.Linear, cfg.heads * cfg.head_dim, cfg.hidden_size, bias=cfg.out_bias, dtype=dtype)
        self.qk_norm = nn.Parameter(torch.ones(2, cfg.head_dim, dtype=dtype)) if cfg.qk_norm else None
        self.register_buffer("head_kind_A", torch.tensor([0] * cfg.heads + [1] * cfg.kv_heads), persistent=False)

    def forward(self, x_T_E: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        qkv_T_A_D = self.qkv_proj(x_T_E).view(-1, heads + 2 * kv_heads, dim)
        qk_T_A_D, v_T_K_D = qkv_T_A_D.split((heads + kv_heads, kv_heads), dim=1)
        if self.qk_norm is not None:
            scale_A_D = self.qk_norm.index_select(0, self.head_kind_A)
            qk_T_A_D = F.rms_norm(qk_T_A_D, (dim,), eps=self.eps) * scale_A_D
        q_T_H_D, k_T_K_D = rotate(qk_T_A_D, cos, sin).split((heads, kv_heads), dim=1)
        return self.o_proj(attend(layer, q_T_H_D, k_T_K_D, v_T_K_D).flatten(1))


class Mlp(nn.Module):
    def __init__(self, cfg: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        wide, bias = cfg.intermediate_size, cfg.mlp_bias
        self.gate_up_proj = skip_init(nn.Linear, cfg.hidden_size, 2 * wide, bias=bias, dtype=dtype)
        self.down_proj = skip_init(nn.Linear, wide, cfg.hidden_size, bias=bias, dtype=dtype)

    def forward(self, x_T_E: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x_T_E).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, cfg: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(cfg.hidden_size, cfg.norm_eps, dtype=dtype)
        self.attention = Attention(cfg, dtype)
        self.post_attention_layernorm = nn.RMSNorm(cfg.hidden_size, cfg.norm_eps, dtype=dtype)
        self.mlp = Mlp(cfg, dtype)

    def forward(self, x_T_E: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        x_T_E = x_T_E + self.attention(self.input_layernorm(x_T_E), cos, sin, layer, attend)
        return x_T_E + self.mlp(self.post_attention_layernorm(x_T_E))


class Decoder(nn.Module):
    """Weights are uninitialised: `asyncrl.models.checkpoint` loads them or draws random ones."""

    def __init__(self, cfg: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = cfg
        self.embed_tokens = skip_init(nn.Embedding, cfg.vocabulary, cfg.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Layer(cfg, dtype) for _ in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.hidden_size, cfg.norm_eps, dtype=dtype)
        self.lm_head = None
        if not cfg.tied_embeddings:
            self.lm_head = skip_init(nn.Linear, cfg.hidden_size, cfg.vocabulary, bias=False, dtype=dtype)
        self.frequencies_D = signed_frequencies(cfg.rope, cfg.head_dim)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Final hidden states, normalised and ready for `logits`."""
        x_T_E = self.embed_tokens(tokens_T)
        cos, sin = rotation(positions_T, self.frequencies_D, x_T_E.dtype)
        for index, layer in enumerate(self.layers):
            x_T_E = layer(x_T_E, cos, sin, index, attend)
        return self.norm(x_T_E)

    @property
    def head_V_E(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_T_E: Tensor) -> Tensor:
        return F.linear(hidden_T_E, self.head_V_E)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Not a buffer: positions need fp32 frequencies whatever dtype the weights are cast to.
        super()._apply(fn, recurse)
        self.frequencies_D = self.frequencies_D.to(self.norm.weight.device)
        return self
