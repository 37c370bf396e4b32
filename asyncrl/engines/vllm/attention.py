"""Attention of vLLM with our own kernel for decoding: `engine.attention=ASYNCRL`.

vLLM's extension point for attention is a backend named CUSTOM, which `worker.py` registers by the path of `Backend`;
this file is only imported where it was chosen. All but one thing is vLLM's FlashAttention: the cache and what is
written there, prompts, batches of both kinds. A batch in which every row has one token goes to the kernel that our own
engine decodes with, which reads an FP8 cache as fast as one in bf16.

FlashAttention plans its work ahead of each batch (`scheduler_metadata`, `max_num_splits`). Our kernel has no use for
that: it reads lengths from the device, and how it splits them follows from the number of rows alone.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from asyncrl.engines.native.cuda.kernels.attention import Scales, attend_last

PAGE = 64
"""Tokens that the kernel takes in one step."""
E4M3 = ("fp8", "fp8_e4m3")
ALL = None, (-1, -1)
"""Windows that hide nothing."""
SPECIAL = "mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_window"
"""What else a batch may say about who sees whom; the first is of 0.26, the second of later versions."""


class Builder(FlashAttentionMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    """Whether rows have one token each decides which kernel is captured, so a graph must keep to that."""


class Decoding(FlashAttentionImpl):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.plain = (
            self.attn_type == AttentionType.DECODER
            and self.alibi_slopes is None
            and self.sliding_window in ALL
            and not self.logits_soft_cap
            and self.sinks is None
            and self.dcp_world_size == 1
            and not self.batch_invariant_enabled
        )
        """Whether a query sees all keys before it, and nothing else matters."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        quantized = output_scale is not None or output_block_scale is not None
        scales = self._scales(layer, query)
        if attn_metadata is None or quantized or not self._decodes(query, kv_cache, scales, attn_metadata, output):
            given: Any = attn_metadata  # None while vLLM measures its memory
            rest = output, output_scale, output_block_scale
            return super().forward(layer, query, key, value, kv_cache, given, *rest)
        if scales is not None:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        lengths_N, table_N_P = attn_metadata.seq_lens, attn_metadata.block_table
        # Rows of a graph that are padding have length 0; tokens that are padding outside of graphs have no row.
        attend_last(query, kv_cache, scales, lengths_N, table_N_P, self.scale, output)
        return output

    def _scales(self, layer: Any, query: Tensor) -> Scales | None:
        """With an FP8 cache FlashAttention wants queries in FP8 as well, so the layer has quantized them."""
        if self.kv_cache_dtype not in E4M3:
            return None
        return Scales(layer._k_scale, layer._v_scale, layer._q_scale if query.dtype == torch.float8_e4m3fn else None)

    def _decodes(
        self, query: Tensor, kv_cache: Tensor, scales: Scales | None, batch: FlashAttentionMetadata, output: Tensor
    ) -> bool:
        """By what is the same whenever a graph is replayed."""
        if scales is None:
            known = kv_cache.dtype == query.dtype
        else:
            known = all(scale is None or scale.numel() == 1 for scale in scales)  # else one for each head
        return (
            self.plain
            and known
            and batch.max_query_len == 1
            and not batch.use_cascade
            and batch.causal is True
            and getattr(batch, "sliding_window", None) in ALL  # 0.26 has it, and puts it before the layer's own
            and all(getattr(batch, name, None) is None for name in SPECIAL)
            and query.stride()[1:] == (self.head_size, 1)
            and output.is_contiguous()
        )


class Backend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up among the names that it knows

    @staticmethod
    def get_impl_cls() -> type[Decoding]:
        return Decoding

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        return [PAGE]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % PAGE == 0

    @classmethod
    def get_required_kv_cache_layout(cls) -> Literal["HND"]:
        """A page of one head in one piece. Required by 0.26; both kernels take any, as later versions choose it."""
        return "HND"
