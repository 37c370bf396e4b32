"""Our settings in vLLM's words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from asyncrl.config.drafter import ActiveDrafter, DrafterSettings
from asyncrl.config.engine import VllmEngine
from asyncrl.config.precision import Fp8
from asyncrl.models.outline import read_outline
from asyncrl.precision.layers import PROJECTIONS
from asyncrl.precision.quantizer import WEIGHT_BLOCK
from asyncrl.system import quiet
from asyncrl.system.devices import has_gpu
from asyncrl.types import Request

BACKEND = "asyncrl"
"""Name under which worker.py registers our weight transfer."""
WORKERS = "asyncrl.engines.vllm.gpu_worker."
SCHEDULERS = "asyncrl.engines.vllm.scheduler."
DTYPES: dict[str, Literal["float32", "bfloat16"]] = {"fp32": "float32", "bf16": "bfloat16"}
CHECKPOINTS = "safetensors"
"""By itself vLLM takes pickled weights where there are no others."""
LOADER = "asyncrl"
"""Name under which loader.py registers the way in which such checkpoints become FP8, or the base of adapters."""
ADAPTED = "adapted"
"""What it is told: the projections that have adapters."""
HEAD = {"head_dtype": "float32"}
"""As the trainer has it (asyncrl/models/head.py)."""
ATTENTION = {"ASYNCRL": "CUSTOM"}
"""vLLM's name for attention that is not its own; worker.py registers ours. Other names are vLLM's, but for `auto`."""
HOPPER = 90
"""Its compute capability, as vLLM writes it."""
SEEDS = 2**63
"""vLLM takes seeds of 63 bits."""


def within(settings: VllmEngine, model: Path) -> VllmEngine:
    """vLLM refuses to start with more positions than the model was made for."""
    positions = read_outline(model).positions or settings.max_length
    return msgspec.structs.replace(settings, max_length=min(settings.max_length, positions))


def engine_args(
    model: Path,
    settings: VllmEngine,
    drafter: DrafterSettings,
    precision: str,
    fp8: Fp8 | None = None,
    adapted: Sequence[str] = (),
    *,
    routes: bool = False,
) -> AsyncEngineArgs:
    settings = settings.in_precision(precision)
    adaptive = adaptive_drafter(drafter) is not None
    most = settings.max_batch * settings.max_length  # a larger batch is an illegal memory access on a GPU in 0.26
    return AsyncEngineArgs(
        model=str(model),
        trust_remote_code="trust_remote_code" in settings.allow_unsafe,
        skip_tokenizer_init=True,  # tokens in, tokens out
        generation_config="vllm",  # the sampling settings are ours, never the checkpoint's
        dtype=DTYPES[settings.carrier(precision)],
        **quantization(settings, read_outline(model).layers, fp8 or Fp8()),
        load_format=LOADER if adapted or settings.travels_in_fp8 else CHECKPOINTS,
        model_loader_extra_config={ADAPTED: list(adapted)} if adapted else {},
        max_model_len=settings.max_length,
        max_num_seqs=settings.max_batch,
        scheduling_policy="priority",  # as they come, but for the probe of new weights, which goes first
        max_num_batched_tokens=min(max(settings.prefill_chunk, settings.max_batch), most),
        gpu_memory_utilization=settings.memory,
        kv_cache_memory_bytes=int(settings.gpu_cache_gib * 2**30) or None,
        tensor_parallel_size=settings.tensor_parallel,
        distributed_executor_backend="uni" if settings.tensor_parallel == 1 else "mp",
        enforce_eager=settings.eager,
        kv_cache_dtype=settings.kv_dtype,
        attention_backend=attention(settings, drafter),
        enable_prefix_caching=True,
        use_tqdm_on_load=quiet.verbose(),  # nor bars over the graphs that are captured
        logprobs_mode="processed_logprobs",  # of the distribution that is really sampled from
        speculative_config=speculative_config(drafter, settings.max_batch),
        scheduler_cls=f"{SCHEDULERS}{'adaptive_scheduler' if adaptive else 'joining_scheduler'}",
        worker_cls=f"{WORKERS}{'DraftingWorker' if adaptive else 'GpuWorker'}" if has_gpu() else "auto",
        worker_extension_cls="asyncrl.engines.vllm.worker.WeightReader",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        enable_return_routed_experts=routes,
        disable_log_stats=False,  # prompts, preemptions and accepted drafts are counted (requests.py)
    )


def quantization(settings: VllmEngine, layers: int, fp8: Fp8) -> dict[str, Any]:
    """What of vLLM's arguments has to do with FP8 weights, and the rest of the same arguments."""
    outer = [*range(fp8.keep_first), *range(layers - fp8.keep_last, layers)]
    kept = [f"model.layers.{layer}.{name}" for layer in outer for name in PROJECTIONS]
    match settings.quantization:
        case "none":
            return {"hf_overrides": HEAD}
        case "fp8":
            chosen = {"quantization": "fp8_per_tensor", "quantization_config": {"ignore": kept}}
            return {"hf_overrides": HEAD, **chosen}
        case "fp8_per_block":
            blocks = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": list(WEIGHT_BLOCK),
                "ignored_layers": kept,
            }
            return {"hf_overrides": {**HEAD, "quantization_config": blocks}}


def attention(settings: VllmEngine, drafter: DrafterSettings) -> AttentionBackendEnum | None:
    """None: vLLM chooses. On Hopper it takes FlashAttention 3, which reads an FP8 cache slower than our kernel does."""
    name, plain = settings.attention, drafter.drafting is None
    if name == "auto" and settings.kv_dtype == "fp8" and plain and current_platform.is_device_capability(HOPPER):
        name = "ASYNCRL"
    return AttentionBackendEnum.__members__.get(ATTENTION.get(name, name))


def adaptive_drafter(drafter: DrafterSettings) -> ActiveDrafter | None:
    """The drafter, if the bandit chooses its tokens, instead of a fixed number or a fixed table."""
    found = drafter.drafting
    return found if found is not None and found.adaptive.on and not found.by_batch else None


def speculative_config(drafter: DrafterSettings, max_batch: int) -> dict[str, Any] | None:
    drafting = drafter.drafting
    if drafting is None:
        return None
    method: dict[str, Any] = {"method": drafting.kind}  # vLLM has the same names
    if (head := drafting.head) is not None:
        method |= {"model": head.path}
    if (ngram := drafting.ngram) is not None:
        method |= {"prompt_lookup_min": ngram.min_match, "prompt_lookup_max": ngram.max_match}
    tokens, schedule = drafting.tokens, [list(entry) for entry in drafting.by_batch]
    if adaptive_drafter(drafter) is not None:
        # A table makes vLLM ask its scheduler, ours, in each step. It has one entry: vLLM takes its CUDA graphs from
        # it, and 0.26 fails to capture those of the head for any number of tokens but the largest.
        tokens = max(strategy.depth for strategy in drafting.strategies)
        schedule = [[1, max_batch, tokens]]
    dynamic = {"num_speculative_tokens_per_batch_size": schedule} if schedule else {}
    return {**method, "num_speculative_tokens": tokens, **dynamic}


def sampling_params(request: Request, settings: VllmEngine) -> SamplingParams:
    """`max_tokens` counts from the first sampled token; what was sampled before a resumption is part of it."""
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        # A resumed answer must not draw the same numbers again.
        seed=(request.seed + request.resumed) % SEEDS if settings.reproducible else None,
        max_tokens=min(sampling.max_tokens - request.resumed, settings.max_length - len(request.tokens)),
        stop_token_ids=list(sampling.stop),
        ignore_eos=True,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        routed_experts_prompt_start=request.routed,
    )
