"""Attention of vLLM with our own kernel for decoding: `engine.attention=ASYNCRL`.

vLLM's extension point for attention is a backend named CUSTOM, which `worker.py` registers by the path of `Backend`;
this file is only imported where it was chosen. All but one thing is vLLM's Triton backend: the cache and what is
written there, prompts, batches of both kinds. A batch in which every row has one token goes to the kernel that our own
engine decodes with, which reads an FP8 cache as fast as one in bf16.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from asyncrl.engines.native.cuda.kernels.attention import attend_last

PAGE = 64
"""Tokens that the kernel takes in one step."""
E4M3 = ("fp8", "fp8_e4m3")


class Builder(TritonAttentionMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    """Whether rows have one token each decides which kernel is captured, so a graph must keep to that."""


class Decoding(TritonAttentionImpl):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.supports_quant_query_input = False  # our kernel multiplies in fp16, and wants queries as they are
        self.plain = (
            self.attn_type == AttentionType.DECODER
            and self.alibi_slopes is None
            and self.sliding_window == (-1, -1)
            and not self.logits_soft_cap
            and self.sinks is None
            and self.chunk_lookback < 0
        )
        """Whether a query sees all keys before it, and nothing else matters."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        quantized = output_scale is not None or output_block_scale is not None
        if attn_metadata is None or quantized or not self._decodes(query, kv_cache, attn_metadata, output):
            given: Any = attn_metadata  # None while vLLM measures its memory
            rest = output, output_scale, output_block_scale
            return super().forward(layer, query, key, value, kv_cache, given, *rest)
        scales: tuple[Any, Any] | None = None
        if self.kv_cache_dtype in E4M3:
            kv_cache, scales = kv_cache.view(torch.float8_e4m3fn), (layer._k_scale, layer._v_scale)
        lengths_N, table_N_P = attn_metadata.seq_lens, attn_metadata.block_table
        # Rows of a graph that are padding have length 0; tokens that are padding outside of graphs have no row.
        attend_last(query, kv_cache, scales, lengths_N, table_N_P, self.scale, output)
        return output

    def _decodes(self, query: Tensor, kv_cache: Tensor, batch: TritonAttentionMetadata, output: Tensor) -> bool:
        """By what is the same whenever a graph is replayed."""
        return (
            self.plain
            and batch.max_query_len == 1
            and batch.causal is True
            and batch.mm_prefix_range_tensor is None
            and batch.rswa_window is None
            and (self.kv_cache_dtype in E4M3 or kv_cache.dtype == query.dtype)
            and query.stride(1) == self.head_size
            and output.is_contiguous()
        )


class Backend(TritonAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up among the names that it knows

    @staticmethod
    def get_impl_cls() -> type[Decoding]:
        return Decoding

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [PAGE]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % PAGE == 0

    @classmethod
    def get_required_kv_cache_layout(cls) -> Literal["HND"]:
        """A page of one head in one piece. Asked by 0.26; the kernel takes any, as later versions choose it."""
        return "HND"
