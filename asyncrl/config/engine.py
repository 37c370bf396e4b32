"""What an engine can be set to, and what the rest of the code asks about it.

A new engine is a struct here that overrides what differs from `EngineBase`, its name in `EngineSettings`, and a line in
`asyncrl.engines.registry`. Reading a config imports no engine.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, Self

import msgspec

from asyncrl.config.base import AboveZero, Chosen, NonNegative, Positive, Probability
from asyncrl.config.drafter import DrafterBase
from asyncrl.config.precision import SIDE, Fp8, RolloutPrecision, numerics
from asyncrl.errors import ConfigError, EngineError

Unsafe = Literal["trust_remote_code", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE"]
KeptBase = Literal["nothing", "adapted", "everything"]
Device = Literal["auto", "cpu", "cuda"]
"""`auto`: a GPU where there is one."""
CPU_EXPERT_BLOCK = 32
"""Outputs that vLLM's kernel for experts computes together on a CPU. It pads their width, but not the hidden size."""


def chosen_gpu(device: Device, found: bool) -> bool:
    """Whether an engine with this `device` computes on a GPU, which the process was `found` to have or not."""
    if device == "cuda" and not found:
        raise EngineError("engine.device=cuda, but torch finds no GPU; use engine.device=cpu or auto")
    return found if device == "auto" else device == "cuda"


class EngineBase(Chosen, frozen=True, kw_only=True):
    """What the rest of the code asks about an engine; the defaults here are those of an engine that can do nothing."""

    has_model: ClassVar[bool] = True
    """Off: it writes no text and reads no weights, so there is nothing to probe, to draft for or to converse with."""
    verifies_drafts: ClassVar[bool] = False
    """Whether it decodes with a drafter."""
    own_decoder: ClassVar[bool] = False
    """Whether it computes with our own decoder, so that it serves only the families that this knows."""
    checks_trees: ClassVar[bool] = False
    """Whether it verifies trees of drafted tokens, and not only chains."""
    merges_adapters: ClassVar[bool] = False
    """Whether it merges LoRA adapters into the weights that it was started with. Others get merged weights."""
    fp8_by_publication: ClassVar[bool] = False
    """Whether each publication says what is in FP8, so that an engine can leave FP8 while it runs."""

    @property
    def label(self) -> str:
        """For messages: its name, and on what it computes where that matters."""
        return self.kind

    # Where it computes.

    @property
    def may_use_gpu(self) -> bool:
        return False

    @property
    def gpus(self) -> int:
        """GPUs of one engine that has some to itself."""
        return 1

    @property
    def gpu_share(self) -> float:
        """Part of a GPU's memory that one engine takes."""
        return 0.0

    def on_gpu(self, drafter: DrafterBase, found: bool) -> bool:
        """Whether it computes on a GPU, which the process was `found` to have or not."""
        return self.may_use_gpu

    def host_kv_cache(self, full: int, *, gpu: bool) -> int:
        """Bytes of KV cache in the host's memory, on a machine with a GPU or without. `full` is what every row at its
        longest takes."""
        return 0

    def kept_base(self, *, gpu: bool, converted: bool) -> KeptBase:
        """Of the weights that adapters are merged into, what it holds beside the merged ones, on a GPU or on a CPU.
        `converted`: some are in FP8 or experts, which kernels may want in another layout."""
        return "nothing"

    @property
    def length_limit(self) -> int | None:
        """Longest prompt plus completion, in tokens."""
        return None

    # Number formats.

    @property
    def real_fp8(self) -> bool:
        """Whether FP8 is the hardware's, beside bf16, and stays for as long as the engine runs. Else it is simulated in
        fp32."""
        return False

    @property
    def travels_in_fp8(self) -> bool:
        """Whether FP8 weights are quantized by the trainer, in blocks. Other engines quantize what they get."""
        return False

    @property
    def own_fp8(self) -> bool:
        """Whether its own settings, and not `rollout.precision`, ask for FP8."""
        return False

    def carrier(self, precision: str) -> Literal["fp32", "bf16"]:
        """What weights travel in, and what is not in FP8 is computed in; a simulation adds no rounding to FP8's."""
        return "bf16" if precision == "bf16" or (precision != "fp32" and self.real_fp8) else "fp32"

    def without_fp8(self) -> Self:
        """The same engine with nothing in FP8."""
        return self

    def check_precision(self, rollout: RolloutPrecision) -> None:
        """Raise ConfigError for settings of its own that contradict those of the rollout."""

    def model_problems(self, joined: Sequence[int]) -> Iterator[str]:
        """A sentence for each thing that does not go with a model; `joined`: outputs of matrices of its layers."""
        yield from ()

    def expert_problems(self, precision: str, hidden_size: int, *, gpu: bool) -> Iterator[str]:
        """A sentence for each thing that does not go with a mixture of experts of this hidden size, in the rollout's
        `precision`, on a machine with a GPU or without."""
        yield from ()

    @property
    def returns_routes(self) -> Literal["always", "on_gpu", "never"]:
        """Whether it returns the experts that it chose for each token, for the trainer to replay."""
        return "never"

    # Drafting.

    @property
    def gives_hidden_states(self) -> bool:
        """Whether it can give a drafter the hidden states of what it decodes."""
        return False


class NativeEngine(EngineBase, frozen=True, kw_only=True, tag="native"):
    """Our own torch engine, embedded in the rollout actor."""

    verifies_drafts = True
    own_decoder = True
    checks_trees = True
    merges_adapters = True
    fp8_by_publication = True

    max_batch: Positive = 128
    """Rows decoded together; further requests wait."""
    max_length: Positive = 4096
    """Longest prompt plus completion, in tokens."""
    prefill_chunk: Positive = 1024
    """Prompt tokens computed per step beside the decoding rows."""
    threads: Positive = 1
    """torch threads of one rollout actor on CPU."""
    device: Device = "cpu"
    """`auto`: a GPU where there is one."""
    memory: Probability = 0.45
    """Share of a GPU's memory for weights and KV cache; the trainer takes the rest when both share a card."""
    graph_memory_gib: AboveZero = 2.0
    """Memory for captured CUDA graphs, part of `memory`; shapes of steps beyond that run kernel by kernel."""

    @property
    def label(self) -> str:
        return f"{self.kind} on a GPU" if self.device == "cuda" else self.kind

    @property
    def returns_routes(self) -> Literal["always", "on_gpu", "never"]:
        return "always"

    @property
    def may_use_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def gpu_share(self) -> float:
        return self.memory if self.may_use_gpu else 0.0

    def on_gpu(self, drafter: DrafterBase, found: bool) -> bool:
        """Trees of drafts need the CPU: `auto` goes there with them."""
        on_cpu = self.device == "auto" and drafter.has_trees
        return not on_cpu and chosen_gpu(self.device, found)

    def host_kv_cache(self, full: int, *, gpu: bool) -> int:
        return 2 * full  # it grows by doubling

    def kept_base(self, *, gpu: bool, converted: bool) -> KeptBase:
        on_gpu = self.device == "cuda" or (gpu and self.may_use_gpu)
        return "adapted" if on_gpu else "nothing"  # on a CPU it reads the model's files again

    @property
    def length_limit(self) -> int:
        return self.max_length

    @property
    def real_fp8(self) -> bool:
        return self.device == "cuda"

    @property
    def travels_in_fp8(self) -> bool:
        return self.device == "cuda"

    @property
    def gives_hidden_states(self) -> bool:
        return True

    def check_precision(self, rollout: RolloutPrecision) -> None:
        if self.device == "auto" and numerics(rollout.precision, rollout.fp8) is not None:
            raise ConfigError(
                f"rollout.precision={rollout.precision}: on a GPU it is FP8, on a CPU a simulation in fp32, and the "
                "trainer publishes for one of them; use engine.device=cuda or engine.device=cpu instead of auto"
            )


class VllmEngine(EngineBase, frozen=True, kw_only=True, tag="vllm"):
    """vLLM's AsyncLLM inside the rollout actor; needs the extra `vllm`."""

    verifies_drafts = True
    merges_adapters = True

    max_batch: Positive = 256
    """Requests decoded together; further ones wait."""
    max_length: Positive = 4096
    """Longest prompt plus completion, in tokens."""
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

    @property
    def may_use_gpu(self) -> bool:
        return True

    @property
    def gpus(self) -> int:
        return self.tensor_parallel

    @property
    def gpu_share(self) -> float:
        return self.memory

    def host_kv_cache(self, full: int, *, gpu: bool) -> int:
        return 0 if gpu else self.cpu_cache_gib << 30

    def kept_base(self, *, gpu: bool, converted: bool) -> KeptBase:
        return "adapted" if gpu and not converted else "everything"  # vLLM loads whole layers then

    @property
    def length_limit(self) -> int:
        return self.max_length

    @property
    def real_fp8(self) -> bool:
        return True

    @property
    def travels_in_fp8(self) -> bool:
        return self.quantization == "fp8_per_block"

    @property
    def own_fp8(self) -> bool:
        return self.quantization != "none" or self.kv_dtype == "fp8"

    def without_fp8(self) -> Self:
        return msgspec.structs.replace(self, quantization="none", kv_dtype="auto")

    def in_precision(self, precision: str) -> Self:
        """`rollout.precision` in vLLM's words; what is set for the engine stays."""
        found = numerics(precision, Fp8())
        if found is None:
            return self
        weights = "fp8" if found.weights and self.quantization == "none" else self.quantization
        return msgspec.structs.replace(self, quantization=weights, kv_dtype="fp8" if found.kv else self.kv_dtype)

    def check_precision(self, rollout: RolloutPrecision) -> None:
        """Trainer and engine are told by different settings what is in FP8, and each would believe its own."""
        found = numerics(rollout.precision, rollout.fp8)
        weights, kv = found is not None and found.weights, found is not None and found.kv
        if self.quantization != "none" and not weights and (found is not None or self.travels_in_fp8):
            better = "fp8_full" if kv else "fp8"
            raise ConfigError(
                f"engine.quantization={self.quantization} has weights in FP8, and rollout.precision="
                f"{rollout.precision} has not; use rollout.precision={better}, or engine.quantization=none"
            )
        if self.kv_dtype == "fp8" and found is not None and not kv:
            raise ConfigError(
                f"engine.kv_dtype=fp8 has keys and values in FP8, and rollout.precision={rollout.precision} has not; "
                "use rollout.precision=fp8_full, or engine.kv_dtype=auto"
            )
        if weights and rollout.fp8.power_of_two:
            raise ConfigError(
                "rollout.fp8.power_of_two=true: vLLM chooses scales by itself; use rollout.fp8.power_of_two=false, or "
                "engine=native"
            )
        if kv and rollout.kv_scales == "trainer" and self.attention == "FLASHINFER":
            raise ConfigError(
                "rollout.kv_scales=trainer: engine.attention=FLASHINFER has scales in its captured graphs, where new "
                "ones do not reach them; use rollout.kv_scales=engine, or another engine.attention"
            )

    @property
    def returns_routes(self) -> Literal["always", "on_gpu", "never"]:
        return "on_gpu"  # its one kernel for CPUs chooses inside

    def expert_problems(self, precision: str, hidden_size: int, *, gpu: bool) -> Iterator[str]:
        if self.in_precision(precision).quantization != "none":
            yield (
                f"rollout.precision={precision} engine.quantization={self.quantization}: vLLM takes no updates of "
                f"experts in FP8 yet; set rollout.precision={self.carrier(precision)} engine.quantization=none"
            )
        if not gpu and hidden_size % CPU_EXPERT_BLOCK:
            yield (
                f"engine=vllm: on a CPU its experts need a hidden size that is a multiple of {CPU_EXPERT_BLOCK}, and "
                f"the model has hidden_size={hidden_size}; use engine=native engine.device=cpu"
            )

    def model_problems(self, joined: Sequence[int]) -> Iterator[str]:
        """vLLM joins these matrices with others of their layer."""
        if not self.travels_in_fp8:
            return
        for size in {part for part in (size // self.tensor_parallel for size in joined) if part % SIDE}:
            yield (
                f"engine.quantization=fp8_per_block: vLLM joins matrices, and a block of {SIDE} would lie across the "
                f"end of one with {size} outputs; use engine.quantization=fp8"
            )


class TransformersEngine(EngineBase, frozen=True, kw_only=True, tag="transformers"):
    """Any causal language model of transformers, decoded by the model's own forward; needs the extra `transformers`.
    Exact and slow: for models that the other engines do not know."""

    max_batch: Positive = 64
    """Rows decoded together; further requests wait."""
    max_length: Positive = 4096
    """Longest prompt plus completion, in tokens; never more than the model has positions."""
    prefill_chunk: Positive = 16_384
    """Tokens of one forward, at most, when completions are computed again after a weight update. A prompt is always
    computed in one forward."""
    threads: Positive = 1
    """torch threads of one rollout actor on CPU."""
    device: Device = "auto"
    """`auto`: a GPU where there is one."""
    memory: Probability = 0.45
    """Share of a GPU's memory that the trainer leaves to the engine when both share a card. Weights are there twice
    during an update; keys and values take what the running completions need."""

    @property
    def may_use_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def gpu_share(self) -> float:
        return self.memory if self.may_use_gpu else 0.0

    def on_gpu(self, drafter: DrafterBase, found: bool) -> bool:
        return chosen_gpu(self.device, found)

    def host_kv_cache(self, full: int, *, gpu: bool) -> int:
        return 0 if gpu and self.may_use_gpu else full

    @property
    def length_limit(self) -> int:
        return self.max_length

    def check_precision(self, rollout: RolloutPrecision) -> None:
        if numerics(rollout.precision, rollout.fp8) is not None:
            raise ConfigError(
                f"rollout.precision={rollout.precision}: engine=transformers computes in fp32 or bf16; use "
                "rollout.precision=bf16, or engine=native or vllm"
            )


class FakeEngine(EngineBase, frozen=True, kw_only=True, tag="fake"):
    """Deterministic engine without a model: scripted lengths and delays, for tests and simulation."""

    has_model = False

    median_tokens: Positive = 16
    sigma: NonNegative = 0.8
    """Spread of the log-normal length distribution."""
    max_batch: Positive = 128
    step_seconds: NonNegative = 0.0
    vocabulary: Positive = 64


EngineSettings = NativeEngine | VllmEngine | TransformersEngine | FakeEngine
