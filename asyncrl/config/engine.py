"""What an engine can be set to. Kept apart from the engines so that reading a config imports none."""

from typing import Literal

from asyncrl.config.base import AboveZero, NonNegative, Positive, Probability, Settings

Unsafe = Literal["trust_remote_code", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE"]


class NativeEngine(Settings, frozen=True, kw_only=True, tag_field="type", tag="native"):
    """Our own torch engine, embedded in the rollout actor."""

    max_batch: Positive = 128
    """Rows decoded together; further requests wait."""
    max_length: Positive = 4096
    """Longest prompt plus answer, in tokens."""
    prefill_chunk: Positive = 1024
    """Prompt tokens computed per step beside the decoding rows."""
    threads: Positive = 1
    """torch threads of one rollout actor on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """`auto`: a GPU where there is one."""
    memory: Probability = 0.45
    """Share of a GPU's memory for weights and KV cache; the trainer takes the rest when both share a card."""
    graph_memory_gib: AboveZero = 2.0
    """Memory for captured CUDA graphs, part of `memory`; shapes of steps beyond that run kernel by kernel."""


class VllmEngine(Settings, frozen=True, kw_only=True, tag_field="type", tag="vllm"):
    """vLLM's AsyncLLM inside the rollout actor; needs the extra `vllm`."""

    max_batch: Positive = 256
    """Requests decoded together; further ones wait."""
    max_length: Positive = 4096
    """Longest prompt plus answer, in tokens."""
    prefill_chunk: Positive = 8192
    """Tokens computed per step, prompts and decoding rows together."""
    memory: Probability = 0.45
    """Share of a GPU's memory for weights and KV cache; the trainer takes the rest when both share a card."""
    gpu_cache_gib: NonNegative = 0.0
    """KV cache on a GPU, in GiB; 0: what `memory` leaves, which vLLM measures as it starts. With a size nothing is
    measured, so that engines can start while others on the same card come and go."""
    cpu_cache_gib: Positive = 1
    """KV cache on a CPU, in GiB."""
    threads: Positive = 1
    """torch threads of one engine on CPU."""
    tensor_parallel: Positive = 1
    """GPUs of one engine."""
    reproducible: bool = True
    """Each request draws from a random stream of its own, fixed by its seed. Off, a batch shares one, which is faster
    for large batches on a GPU."""
    eager: bool = False
    """Skip compilation and CUDA graphs: a faster start, slower decoding."""
    quantization: Literal["none", "fp8", "fp8_per_block"] = "none"
    """`fp8`: vLLM quantizes weights as it loads them, with one scale per matrix. `fp8_per_block`: the trainer does, as
    for our own engine, with one per block of 128 x 128. Both need a GPU."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Number format of the KV cache; `auto` is that of the weights."""
    attention: Literal["auto", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "ASYNCRL"] = "auto"
    """Kernels of attention on a GPU; `ASYNCRL`: FLASH_ATTN, but for decoding, which our own engine's kernel does. How
    fast they read an FP8 cache differs much. `auto`: `ASYNCRL` for such a cache on Hopper, else vLLM chooses."""
    start_timeout_s: AboveZero = 600.0
    """Time to load the model, compile and capture graphs."""
    allow_unsafe: tuple[Unsafe, ...] = ()
    """Doors that stay closed unless they are named here: code that comes with a model, and two of vLLM's environment
    variables, which let it unpickle what it is sent and serve its development endpoints (SECURITY.md)."""


class FakeEngine(Settings, frozen=True, kw_only=True, tag_field="type", tag="fake"):
    """Deterministic engine without a model: scripted lengths and delays, for tests and simulation."""

    median_tokens: Positive = 16
    sigma: NonNegative = 0.8
    """Spread of the log-normal length distribution."""
    max_batch: Positive = 128
    step_seconds: NonNegative = 0.0
    vocabulary: Positive = 64


EngineSettings = NativeEngine | VllmEngine | FakeEngine
