"""What would run, and what stands in its way, before anything expensive starts."""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncrl import floors
from asyncrl.algorithms.settings import CustomAlgorithm, CustomCorrection
from asyncrl.config import Checkpoint, Run, WarmStart, check
from asyncrl.devices import has_avx512, has_gpu, mps_runs
from asyncrl.drafting.settings import NoDrafter
from asyncrl.engines.settings import FakeEngine, VllmEngine
from asyncrl.engines.vllm import environment, versions
from asyncrl.errors import AsyncRLError, CheckpointError, ConfigError, MissingDependencyError
from asyncrl.functions import load_function
from asyncrl.models.config import ModelConfig
from asyncrl.precision.memory import footprints
from asyncrl.precision.settings import carrier, model_problems, numerics
from asyncrl.rewards.pool import check_function
from asyncrl.tasks.settings import ChainsTask
from pipelines.estimate import Needs, card, longest_prompt, model_config, needs

SHARED_MEMORY = Path("/dev/shm")
REFERENCE_CARD = 80 * 10**9
"""Memory of a GPU that precisions are compared on where none is here."""
ADDRESS = re.compile(r"(ray://)?([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


def preflight(run: Run) -> None:
    """Raise ConfigError with everything that would make the run fail."""
    check(run)
    found = problems(run)
    if len(found) > 1:
        raise ConfigError("\n  - ".join([f"{len(found)} problems", *found]))
    if found:
        raise ConfigError(found[0])


def problems(run: Run) -> list[str]:
    """A sentence for each thing that stands in the way, with the way out; empty when nothing does."""
    return [
        *floors.problems(),
        *_place(run),
        *_cluster(run),
        *_engine(run),
        *_weights(run),
        *_functions(run),
        *_model(run),
    ]


def _place(run: Run) -> Iterator[str]:
    directory = Path(run.root) / run.name
    if directory.exists():
        yield f"{directory} exists already: continue it with `asyncrl resume {directory}` or choose another name="
    home = _existing(directory)
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        yield f"root={run.root}: {home} is not a directory that can be written to; choose another root="


def _cluster(run: Run) -> Iterator[str]:
    if run.cluster not in ("local", "auto", "inprocess") and not ADDRESS.fullmatch(run.cluster):
        yield f"cluster={run.cluster} is neither local, auto, inprocess nor an address such as 10.0.0.1:6379"


def _engine(run: Run) -> Iterator[str]:
    if not isinstance(run.engine, VllmEngine):
        return
    if wrong := versions.problem(versions.installed()):
        yield wrong
    yield from environment.problems(run.engine)
    here = run.cluster in ("local", "inprocess")
    if not here or has_gpu():
        return
    if numerics(run.rollout.precision, run.rollout.fp8) is not None:
        chosen = run.rollout.precision
        yield f"rollout.precision={chosen} with engine=vllm needs a GPU; engine=native simulates FP8 on a CPU"
    if run.engine.quantization == "fp8":
        yield "engine.quantization=fp8 needs a GPU, and there is none here; use engine.quantization=none"
    if run.engine.kv_dtype == "fp8" and not has_avx512():
        yield "engine.kv_dtype=fp8 needs a GPU or an x86 CPU with AVX-512; use engine.kv_dtype=auto"
    if not isinstance(run.drafter, NoDrafter) and run.rollout.temperature > 0:
        yield (
            f"drafter={run.drafter.__struct_config__.tag} with engine=vllm needs a GPU: on a CPU vLLM 0.29 samples "
            "drafted tokens wrongly and reports wrong log-probabilities; use engine=native, or drafter=none"
        )
    if run.engine.tensor_parallel > 1:
        yield f"engine.tensor_parallel={run.engine.tensor_parallel} needs as many GPUs, and there is none here"


def _weights(run: Run) -> Iterator[str]:
    """Transports that this machine cannot have."""
    transport = run.weights.transport
    if transport not in ("cuda_ipc", "nccl") or run.cluster not in ("local", "inprocess"):
        return
    if not has_gpu():
        yield f"weights.transport={transport} needs a GPU, and there is none here; use weights.transport=auto"
    elif find_spec("cupy") is None:
        yield f"weights.transport={transport} needs cupy: pip install 'asyncrl[nccl]', or use weights.transport=file"


def _functions(run: Run) -> Iterator[str]:
    """Functions of the user's that cannot be loaded."""
    checks: list[Callable[[], object]] = [lambda: check_function(run.reward)]
    for field, part in (("algorithm.function", run.algorithm), ("correction.function", run.correction)):
        if isinstance(part, CustomAlgorithm | CustomCorrection):
            checks.append(partial(load_function, part.function, field))
    for find in checks:
        try:
            find()
        except ConfigError as error:
            yield str(error)


def _model(run: Run) -> Iterator[str]:
    """Problems of the model, of its prompts and of the room that both need."""
    if isinstance(run.model, WarmStart) and (run.rollout.chat or not isinstance(run.task, ChainsTask)):
        yield (
            "model=warm_start writes its examples for task=chains only, and without a chat template: use "
            "model=checkpoint model.path=DIRECTORY"
        )
        return
    try:
        model = model_config(run)
        prompt = longest_prompt(run)
    except (ConfigError, MissingDependencyError) as error:
        yield str(error)
        return
    except CheckpointError as error:
        yield f"model.path={run.model.path}: {error}" if isinstance(run.model, Checkpoint) else f"model: {error}"
        return
    longest = prompt + run.rollout.max_tokens
    if not isinstance(run.engine, FakeEngine) and longest > run.engine.max_length:
        yield (
            f"engine.max_length={run.engine.max_length} is less than the longest prompt with rollout.max_tokens="
            f"{run.rollout.max_tokens}: set engine.max_length={longest}, or lower rollout.max_tokens"
        )
    yield from model_problems(run, layers=model.layers, qk_norm=model.qk_norm)
    required = needs(run, model, prompt)
    yield from _room(run, required)
    if run.cluster in ("local", "inprocess"):
        yield from _card(run, required)


def _room(run: Run, required: Needs) -> Iterator[str]:
    if required.trajectories > run.buffer.max_bytes:
        yield (
            f"buffer.max_bytes={run.buffer.max_bytes} is less than one step of full-length answers: it might never be "
            f"complete; set buffer.max_bytes={required.trajectories}"
        )
    disk = (run.checkpoint.keep + 1) * required.checkpoint + required.trajectories
    free = shutil.disk_usage(_existing(Path(run.root))).free
    if disk > free:
        yield f"root={run.root} has {size(free)} free, and checkpoints with one step of trajectories take {size(disk)}"
    if run.cluster not in ("local", "inprocess"):
        return  # the memory of other machines is not known here
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if required.host(run) > memory:
        yield (
            f"this machine has {size(memory)} of memory and the run needs about {size(required.host(run))}: take a "
            "smaller model, or lower engine.max_batch, trainer.token_budget or rollout.replicas"
        )
    if SHARED_MEMORY.is_dir() and 2 * required.published > (shared := shutil.disk_usage(SHARED_MEMORY).free):
        yield (
            f"{SHARED_MEMORY} has {size(shared)} free and two versions of the weights take "
            f"{size(2 * required.published)}: enlarge it (docker: --shm-size)"
        )


def _card(run: Run, required: Needs) -> Iterator[str]:
    """Trainer and engines share one GPU."""
    found = card(run, required)
    if found is None:
        return
    if found.trainer + found.engines > found.total:
        room = max(0.0, 1 - found.trainer / found.total) / run.rollout.replicas
        lower = f"lower engine.memory to {math.floor(100 * room) / 100:g}" if room > 0.01 else "take a larger GPU"
        yield (
            f"the GPU has {size(found.total)}; the trainer needs about {size(found.trainer)} of it and the engines get "
            f"{size(found.engines)}: {lower}, or lower trainer.token_budget or trainer.logits_bytes"
            f"{'' if required.recompute else ', or set trainer.checkpoint_activations=true'}"
        )
    each = found.engines // run.rollout.replicas
    if 0 < each < required.engine_weights:
        yield (
            f"an engine gets {size(each)} of the GPU, and its weights alone take {size(required.engine_weights)}: "
            "raise engine.memory"
        )


def _existing(path: Path) -> Path:
    """The closest place above `path` that is there."""
    return next(place for place in (path.resolve(), *path.resolve().parents) if place.exists())


def show(run: Run, console: Console) -> None:
    """Print who would run, what one step is made of, and what moves between the actors."""
    groups, samples = run.flow.groups_per_step, run.rollout.group_size
    console.print(f"{run.name}: {run.steps} steps into {Path(run.root) / run.name}", style="bold")
    console.print(
        f"1 step = {groups} prompts x {samples} = {run.samples_per_step} samples; "
        f"training begins with the first {run.flow.groups_per_take} complete groups; "
        f"up to {run.capacity_groups} groups admitted ahead; {_staleness(run)}"
    )
    try:
        model = model_config(run)
        prompt = longest_prompt(run)
    except AsyncRLError:
        return  # `preflight` says why
    required = needs(run, model, prompt)
    console.print(
        f"model: {model.family}, {required.parameters:,} parameters, {size(required.published)} published in "
        f"{carrier(run.rollout.precision, run.engine)}; longest prompt with its answer "
        f"{prompt + run.rollout.max_tokens} tokens"
    )
    console.print(_actors(run, required), _edges(run, required), _precisions(run, model, required))
    total = run.steps * required.trajectories
    console.print(
        f"this machine: {os.cpu_count()} CPUs; memory at most about {size(required.host(run))}; on disk at most "
        f"{size((run.checkpoint.keep + 1) * required.checkpoint)} of checkpoints and {size(total)} of trajectories"
    )
    _show_card(run, required, console)


def _show_card(run: Run, required: Needs, console: Console) -> None:
    found = card(run, required)
    if found is None:
        return
    console.print(
        f"GPU: {size(found.total)}; trainer at most about {size(found.trainer)}, of which {size(required.training)} "
        f"for training ({'activations computed again' if required.recompute else 'activations kept'}); engines "
        f"{size(found.engines)}; {size(found.total - found.trainer - found.engines)} left"
    )
    if found.trainer and found.engines:
        console.print(
            "CUDA MPS is on: kernels of trainer and engines run side by side"
            if mps_runs()
            else "CUDA MPS is off: trainer and engines take turns on the card. `nvidia-cuda-mps-control -d` turns it on"
        )


def _staleness(run: Run) -> str:
    if run.max_staleness == 0:
        return "synchronous: every token is of the version that is trained"
    return f"the oldest token at most {run.max_staleness} version{'s' * (run.max_staleness > 1)} old"


def _actors(run: Run, required: Needs) -> Table:
    table = Table("actor", "processes", "CPUs each", "memory each, at most about", title="actors", title_justify="left")
    threads = 1 if isinstance(run.engine, FakeEngine) else run.engine.threads
    kv = f"KV cache {size(required.kv_cache)}"
    optimizer = f"weights, gradients and Adam {size(required.optimizer)}, activations {size(required.activations)}"
    rows = [
        (f"rollout ({run.engine.__struct_config__.tag})", run.rollout.replicas, threads, required.rollout, kv),
        (f"trainer ({run.algorithm.__struct_config__.tag})", 1, run.trainer.threads, required.trainer, optimizer),
    ]
    for name, processes, cpus, memory, parts in rows:
        table.add_row(name, str(processes), str(cpus), f"{size(memory)} ({parts})")
    table.add_row("buffer", "1", "shared", f"up to {size(run.buffer.max_bytes)} of trajectories, on disk")
    table.add_row("reward", f"1 + {run.reward.workers}", "shared", run.reward.function)
    return table


def _precisions(run: Run, model: ModelConfig, required: Needs) -> Table:
    """What an engine on a GPU takes; on a CPU FP8 is simulated in floats, and saves nothing."""
    found = card(run, required)
    room = found.engines // run.rollout.replicas if found is not None and found.engines else REFERENCE_CARD
    title = f"rollout.precision: an engine with {size(room)} of a GPU"
    table = Table("precision", "weights", "KV cache per token", "KV tokens", title=title, title_justify="left")
    for each in footprints(model, required.parameters, run.rollout.fp8):
        mark = " (chosen)" if each.precision == run.rollout.precision else ""
        tokens = f"{each.tokens(room):,}" if each.tokens(room) else "none: the weights do not fit"
        table.add_row(f"{each.precision}{mark}", size(each.weights), size(each.kv_token), tokens)
    return table


def _edges(run: Run, required: Needs) -> Table:
    table = Table("edge", "each step", title="traffic", title_justify="left")
    table.add_row("rollout -> buffer -> trainer", f"at most {size(required.trajectories)} of trajectories")
    table.add_row(
        f"trainer -> {run.rollout.replicas} x rollout", f"{size(required.published)} of weights, read by each"
    )
    return table


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
