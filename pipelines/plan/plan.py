"""What stands in the way of a run, before anything expensive starts."""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from asyncrl.buffer.log import MAX_PAYLOAD
from asyncrl.chat import chat_format
from asyncrl.config import Run, check
from asyncrl.config import trackers as tracking
from asyncrl.config.judge import Judge
from asyncrl.config.precision import model_problems
from asyncrl.config.run import PIPELINES
from asyncrl.config.user_code import Called, stages
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.engines import registry as engines
from asyncrl.errors import CheckpointError, ConfigError, MissingDependencyError, UserCodeError
from asyncrl.fleet.placement import GPU, Offer, demands, missing
from asyncrl.judges.client import read_key
from asyncrl.judges.form import template
from asyncrl.models.config import ModelConfig
from asyncrl.models.degrees import degree_problems
from asyncrl.models.routes import replayed_shape
from asyncrl.system import minimum_versions, shared_gpu
from asyncrl.system.devices import gpu_count, has_gpu
from asyncrl.system.user_functions import is_here, load_function
from asyncrl.user_code.pool import check_function
from pipelines.plan import backend, teachers
from pipelines.plan.disk import most_checkpoints
from pipelines.plan.estimate import Needs, card, longest, longest_prompt, model_config, needs, size, token_bytes

SHARED_MEMORY = Path("/dev/shm")
ADDRESS = re.compile(r"(ray://)?([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


def preflight(run: Run, offer: Offer | None = None) -> None:
    """Raise ConfigError with everything that would make the run fail; `offer` is what the cluster has, if known."""
    check(run)
    found = problems(run, offer)
    if len(found) > 1:
        raise ConfigError("\n  - ".join([f"{len(found)} problems", *found]))
    if found:
        raise ConfigError(found[0])


def problems(run: Run, offer: Offer | None = None) -> list[str]:
    """A sentence for each thing that stands in the way, with the way out; empty when nothing does."""
    return [
        *minimum_versions.problems(),
        *_place(run),
        *_cluster(run),
        *engines.problems(run),
        *_weights(run),
        *_ranks(run, offer),
        *_functions(run),
        *_judge(run),
        *_agent(run),
        *tracking.problems(run.trackers, run.cluster),
        *_model(run),
        *teachers.problems(run),
        *(_placement(run, offer) if offer is not None else ()),
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


def _placement(run: Run, offer: Offer) -> Iterator[str]:
    if not run.placement.wait_s:
        yield from missing(list(demands(run, offer).values()), offer)


def _weights(run: Run) -> Iterator[str]:
    """Transports that this machine cannot have."""
    transport = run.weights.transport
    if not run.weights.traits.needs_gpus or run.cluster not in ("local", "inprocess"):
        return
    if not has_gpu():
        yield f"weights.transport={transport} needs a GPU, and there is none here; use weights.transport=auto"
    elif find_spec("cupy") is None:
        yield f"weights.transport={transport} needs cupy: pip install 'asyncrl[nccl]', or use weights.transport=file"


def _ranks(run: Run, offer: Offer | None) -> Iterator[str]:
    """Each rank of the trainer needs a GPU to itself, where it is to compute on one, unless they may share."""
    if run.cluster in ("local", "inprocess"):
        cards, where = gpu_count(), "this machine"
        if run.shares_gpu and cards and (why_not := shared_gpu.problem(shared_gpu.installed())):
            yield why_not
    elif offer is not None and not run.placement.wait_s:
        cards, where = int(max(each.get(GPU, 0.0) for each in (offer.total, offer.could_have or {}))), "the cluster"
    else:
        return
    if run.trainer.device != "cpu" and 0 < cards < run.trainer.ranks and not run.shares_gpu:
        yield (
            f"trainer.ranks={run.trainer.ranks} need a GPU each, and {where} has {cards}: use "
            f"trainer.ranks={cards}, trainer.device=cpu, or placement.share_gpu=true to put several on one"
        )
    elif run.trainer.device == "cuda" and not cards:
        yield f"trainer.device=cuda, and {where} has no GPU; use trainer.device=auto"


def _functions(run: Run) -> Iterator[str]:
    """Functions of the user's that cannot be loaded."""
    environment = [run.environment] if run.environment.on else []
    agent = [run.agent] if run.agent.on else []
    reward = [run.reward] if run.reward.function else []
    suites = [suite.reward for suite in run.evaluation.suites if suite.reward is not None]
    called: list[Called] = [*reward, *environment, *agent, *stages(run.stages), *suites]
    names = [settings.function for settings in called]
    checks: list[Callable[[], object]] = [partial(check_function, settings) for settings in called]
    own = [] if run.pipeline in PIPELINES else [("pipeline", run.pipeline)]
    for field, name in (*own, *run.algorithm.functions, *run.correction.functions):
        checks.append(partial(load_function, name, field))
        names.append(name)
    if run.cluster != "inprocess" and (here := [name for name in names if is_here(name)]):
        yield (
            f"{', '.join(here)}: a lambda or a function of a notebook exists in this process alone, and with cluster="
            f"{run.cluster} others would have to call it: put it into a file, or use cluster=inprocess"
        )
    for find in checks:
        try:
            find()
        except ConfigError as error:
            yield str(error)


def _judge(run: Run) -> Iterator[str]:
    """What the judge needs; whether its server answers is tried later."""
    if not run.reward.judge.on:
        return
    if find_spec("httpx2") is None:
        yield "reward.judge.url needs httpx2: pip install 'asyncrl[judge]'"
    checks: list[Callable[[Judge], object]] = [template, read_key]
    for find in checks:
        try:
            find(run.reward.judge)
        except ConfigError as error:
            yield str(error)


def _agent(run: Run) -> Iterator[str]:
    """What the gateway needs."""
    if not run.agent.on:
        return
    if missing_modules := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        yield f"agent.* needs {' and '.join(missing_modules)}: pip install 'asyncrl[agents]'"
    if (directory := run.model.directory) is not None and (directory / "tokenizer.json").is_file():
        try:
            chat_format(load_tokenizer(directory), run.agent.tool_format)
        except (CheckpointError, ConfigError) as error:
            yield str(error)
    elif run.agent.tool_format:
        yield f"agent.tool_format={run.agent.tool_format}: the model has no chat template that could show tools"


def _model(run: Run) -> Iterator[str]:
    """Problems of the model, of its prompts and of the room that both need."""
    if run.model.warm_start is not None and (run.rollout.chat or run.task.worked_examples is None):
        yield (
            "model=warm_start writes its examples for task=chains only, and without a chat template: use "
            "model=checkpoint model.path=DIRECTORY"
        )
        return
    try:
        model = model_config(run)
        prompt = longest_prompt(run)
    except (ConfigError, MissingDependencyError, UserCodeError) as error:
        yield str(error)
        return
    except CheckpointError as error:
        yield f"model: {error}" if run.model.directory is None else f"model.path={run.model.directory}: {error}"
        return
    whole = prompt + run.most_tokens
    if run.engines and (limit := run.engine.length_limit) is not None and whole > limit:
        yield (
            f"engine.max_length={limit} is less than the longest prompt with rollout.max_tokens="
            f"{run.rollout.max_tokens}: set engine.max_length={whole}, or lower rollout.max_tokens{_named(run)}"
        )
    yield from backend.problems(run, model, whole)
    yield from degree_problems(run.trainer, model)
    if model.backend == "native":
        yield from _own_decoder(run, model, whole)
    elif model.experts is not None:
        yield from _experts(run, model.hidden_size)
    required = needs(run, model, prompt)
    yield from _room(run, required)
    if run.cluster in ("local", "inprocess"):
        yield from _card(run, required)


def _named(run: Run) -> str:
    """Which prompt is the longest, where somebody wrote them."""
    tokens, prompt = longest(run)
    return f", or leave out prompt {prompt.uid}, which has {tokens} tokens" if run.model.directory is not None else ""


def _own_decoder(run: Run, model: ModelConfig, longest: int) -> Iterator[str]:
    joined = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.intermediate_size
    yield from model_problems(run, layers=model.layers, qk_norm=model.qk_norm, joined=joined)
    yield from _router_replay(run, model, longest)
    if model.experts is not None:
        yield from _experts(run, model.hidden_size)
    elif run.algorithm.router_aux_loss:
        yield (
            f"algorithm.router_aux_loss={run.algorithm.router_aux_loss:g} balances the load of experts, and the model "
            "has none: set algorithm.router_aux_loss=0"
        )


def _router_replay(run: Run, model: ModelConfig, longest: int) -> Iterator[str]:
    largest = longest * token_bytes(run, model)
    if replayed_shape(run, model) is not None and largest > MAX_PAYLOAD:
        yield (
            f"rollout.router_replay={run.rollout.router_replay}: a sample of {longest} tokens with their routes takes "
            f"{size(largest)}, and the buffer stores {size(MAX_PAYLOAD)} at most; set rollout.router_replay=off, or "
            "lower rollout.max_tokens"
        )
    if run.rollout.router_replay != "on":
        return
    if model.experts is None:
        yield (
            "rollout.router_replay=on replays which experts the engine chose, and the model has no experts: set "
            "rollout.router_replay=auto"
        )
    elif (returns := run.engine.returns_routes) == "never" or (returns == "on_gpu" and not _may_have_gpu(run)):
        where = " on a CPU" if returns == "on_gpu" else ""
        yield (
            f"rollout.router_replay=on: engine={run.engine.label} does not return which experts it chose{where}; set "
            "rollout.router_replay=auto, or use engine=native"
        )


def _experts(run: Run, hidden_size: int) -> Iterator[str]:
    """What a mixture of experts cannot do yet."""
    yield from run.engine.expert_problems(run.rollout.precision, hidden_size, gpu=_may_have_gpu(run))


def _may_have_gpu(run: Run) -> bool:
    """Of a cluster elsewhere it is not known."""
    return run.cluster not in ("local", "inprocess") or has_gpu()


def _room(run: Run, required: Needs) -> Iterator[str]:
    if required.trajectories > run.buffer.max_bytes:
        yield (
            f"buffer.max_bytes={run.buffer.max_bytes} is less than one step of full-length samples: it might never be "
            f"complete; set buffer.max_bytes={required.trajectories}"
        )
    yield from _disk(run, required)
    if run.cluster not in ("local", "inprocess"):
        return  # the memory of other machines is not known here
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if required.host(run) > memory:
        yield (
            f"this machine has {size(memory)} of memory and the run needs about {size(required.host(run))}: take a "
            "smaller model, or lower engine.max_batch, trainer.token_budget or rollout.replicas"
        )
    needed = required.shared_memory(run)
    if SHARED_MEMORY.is_dir() and needed > (shared := shutil.disk_usage(SHARED_MEMORY).free):
        yield (
            f"{SHARED_MEMORY} has {size(shared)} free and two versions of the weights take {size(needed)}: enlarge it "
            "(docker: --shm-size)"
        )


def _disk(run: Run, required: Needs) -> Iterator[str]:
    """Checkpoints as they are set, and one step of trajectories."""
    most, free = most_checkpoints(run), shutil.disk_usage(_existing(Path(run.root))).free
    if most * required.checkpoint + required.trajectories <= free:
        return
    trajectories = f"{size(required.trajectories)} for one step of trajectories"
    if not most:
        yield f"root={run.root} has {size(free)} free, and the run needs {trajectories}: choose another root="
        return
    kept = run.checkpoint
    fit = max(0, free - required.trajectories) // required.checkpoint  # fewer than `most`
    ways = ["choose another root="]
    if fit > 1:
        ways.append(f"set checkpoint.keep={fit - 1}")
    elif fit == 1:
        ways.append(f"set checkpoint.every=0{'' if kept.last else ' checkpoint.last=true'} to save the last step only")
    ways.append("set checkpoint.every=0 checkpoint.last=false to save none")
    why = (
        f"checkpoint.keep={kept.keep}, and one being written"
        if most > kept.keep
        else f"steps={run.steps} checkpoint.every={kept.every} checkpoint.last={str(kept.last).lower()}"
    )
    yield (
        f"root={run.root} has {size(free)} free, and the run needs {size(most * required.checkpoint)} for checkpoints "
        f"({most} x {size(required.checkpoint)}: {why}) and {trajectories}: {', or '.join(ways)}"
    )


def _card(run: Run, required: Needs) -> Iterator[str]:
    """Trainer and engines share one GPU."""
    found = card(run, required)
    if found is None:
        return
    taken = found.trainer + found.teachers
    if taken + found.engines > found.total:
        room = max(0.0, 1 - taken / found.total) / max(1, run.engines)
        with_drafter = " with the drafter" if run.drafter.trains else ""
        lower = f"lower engine.memory to {math.floor(100 * room) / 100:g}" if room > 0.01 else "take a larger GPU"
        yield (
            f"the GPU has {size(found.total)}; the trainer{with_drafter} needs about {size(found.trainer)} of it"
            f"{f', teachers {size(found.teachers)}' if found.teachers else ''} and the engines get "
            f"{size(found.engines)}: {lower}, or lower trainer.token_budget or trainer.logits_bytes"
            f"{'' if required.recomputed == required.layers else ', or set trainer.checkpoint_activations=true'}"
        )
    each = found.engines // max(1, run.engines)
    weights = required.engine_weights + required.engine_base
    if 0 < each < weights:
        base = ", with what adapters are merged into," if required.engine_base else ""
        yield (
            f"an engine gets {size(each)} of the GPU, and its weights{base} alone take {size(weights)}: "
            "raise engine.memory"
        )


def _existing(path: Path) -> Path:
    """The closest place above `path` that is there."""
    return next(place for place in (path.resolve(), *path.resolve().parents) if place.exists())
