"""A run's settings: frozen tagged unions that refuse unknown fields. `load` is the only place that sees a dict.

YAML holds only what differs from these defaults. Numbers that follow from others are properties, never second
settings that could disagree.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import msgspec

from asyncrl.config.algorithm import NO_CORRECTION, Algorithm, AlgorithmBase, Correction, Grpo, Importance
from asyncrl.config.base import AboveZero, Chosen, Fraction, Natural, NonNegative, Positive, Probability, Settings
from asyncrl.config.curriculum import Curriculum, check_curriculum
from asyncrl.config.distillation import Distillation, Teacher, check_distillation
from asyncrl.config.drafter import DrafterSettings, NoDrafter, Source
from asyncrl.config.engine import EngineSettings, NativeEngine
from asyncrl.config.errors import did_you_mean, explain, unknown_keys
from asyncrl.config.fleet import Concurrency, Elastic, check_pool
from asyncrl.config.judge import check_judge
from asyncrl.config.placement import Placement
from asyncrl.config.precision import RolloutPrecision, check_precision
from asyncrl.config.sft import Sft, check_sft
from asyncrl.config.staleness import FixedStaleness, StalenessControl
from asyncrl.config.task import ChainsTask, TaskSettings
from asyncrl.config.trackers import TrackerName
from asyncrl.config.trainer import Trainer, check_trainer
from asyncrl.config.user_code import Agent, Environment, Stages, check_agent, check_environment, check_reward
from asyncrl.config.user_code import Reward as Reward
from asyncrl.config.weights import Weights, check_weights
from asyncrl.errors import ConfigError

DEFAULT_PIPELINE = "async_grpo"
PIPELINES = (DEFAULT_PIPELINE, "distill", "sft")
"""Ours, by name; `pipelines.registry` has their classes."""
Backend = Literal["auto", "native", "transformers"]


class ModelBase(Chosen, frozen=True, kw_only=True):
    """What the rest of the code asks about the model that a run starts from."""

    backend: Backend = "auto"
    """Whose code computes the model in training. `auto`: our own decoder for the families that it knows (Llama, Qwen2,
    Qwen3, Qwen3-MoE), else the class of Hugging Face's transformers."""

    @property
    def directory(self) -> Path | None:
        """Where it is; None: it is made with the run."""
        return None

    @property
    def warm_start(self) -> "WarmStart | None":
        """How it is made; None: it is there."""
        return None


class Checkpoint(ModelBase, frozen=True, tag="checkpoint"):
    """Start from a Hugging Face model directory."""

    path: str

    @property
    def directory(self) -> Path:
        return Path(self.path).expanduser()


class WarmStart(ModelBase, frozen=True, tag="warm_start"):
    """Make a small model on the spot: fresh weights and a short supervised start on noisy worked examples."""

    hidden_size: Positive = 128
    layers: Positive = 2
    heads: Positive = 4
    kv_heads: Positive = 1
    intermediate_size: Positive = 280
    experts: Natural = 0
    """More than 0: a mixture of so many experts in each layer, in place of one gated layer of `intermediate_size`."""
    active_experts: Positive = 2
    """Of a token."""
    expert_size: Positive = 64
    """Width of the gated layer of an expert."""
    steps: Positive = 800
    batch_tokens: Positive = 400
    lr: AboveZero = 3e-3
    noise: Fraction = 0.2
    """Chance that a worked step of the examples is wrong."""

    def __post_init__(self) -> None:
        if 0 < self.experts < self.active_experts:
            raise ValueError(f"active_experts={self.active_experts} must not be above experts={self.experts}")

    @property
    def warm_start(self) -> Self:
        return self


ModelSource = Checkpoint | WarmStart


class Rollout(RolloutPrecision, frozen=True):
    """How completions are generated."""

    replicas: Natural = 1
    """Engines; with `elastic.max` those that the run begins with. 0: none, for a pipeline that generates nothing."""
    group_size: Positive = 8
    max_tokens: Positive = 256
    temperature: NonNegative = 1.0
    top_p: Probability = 1.0
    """Sample from the smallest set of tokens that has this probability; the trainer's policy is restricted as well."""
    top_k: Natural = 0
    """Before that, keep so many of the likeliest tokens; 0: all."""
    on_update: Literal["keep", "recompute"] = "keep"
    """Running completions at a weight update: keep their old keys and values, or prefill them again."""
    router_replay: Literal["auto", "on", "off"] = "auto"
    """The trainer uses the experts that the engine chose for each token. `auto`: on where the model has experts and the
    engine always returns its choice, as the native one does; vLLM does so on a GPU, if it is `on`. Agents have
    none."""
    chat: bool = False
    """Show each prompt as a user's turn in the model's own chat template."""
    system: str = ""
    """System message of the chat; empty leaves it to the template."""


class Flow(Settings, frozen=True):
    """Batch arithmetic and deadlines."""

    groups_per_step: Positive = 32
    groups_per_take: Positive = 4
    """Complete groups that the trainer waits for before it starts a forward and backward."""
    max_ready_groups: Natural | Literal["auto"] = "auto"
    """No group is admitted while so many are complete or just begun, so that the trainer gets fresh ones. `auto`: as
    few as it needs in order not to wait; 0: as many as `max_staleness` allows."""
    group_timeout_s: AboveZero = 300.0
    """A group not complete after this is dropped and counted."""
    incomplete: Literal["drop", "train_rest"] = "drop"
    """A group of which a sample fails, or is not finished in time: drop all of it, or train on the others."""
    incomplete_min: Positive = 2
    """With `train_rest`: samples that must be left, else the group is dropped."""
    stall_timeout_s: AboveZero = 600.0
    """No progress for this long ends the run with a diagnosis."""


class Sentinel(Settings, frozen=True):
    """When a run stops by itself, because it cannot learn any more."""

    max_kl: NonNegative = 0.5
    """Largest |mismatch_kl| of a step; 0 turns it off."""
    on_fp8: Literal["stop", "fall_back", "restart"] = "stop"
    """At that KL with completions sampled in FP8: end the run, go on without FP8 from the next version on, or start the
    engines again without FP8, from the last checkpoint."""
    max_skipped: Positive = 3
    """Steps in a row whose loss or gradient is not finite."""
    skip_steps: tuple[Positive, ...] = ()
    """Steps to leave out, counted from 1: their samples count as consumed, and the weights stay what they were. For a
    run that stopped at such a step and is resumed."""


class Buffer(Settings, frozen=True):
    """The trajectory buffer."""

    durability: Literal["memory", "process", "disk"] = "process"
    """What an acknowledged trajectory survives: nothing, kill -9, power loss."""
    max_bytes: Positive = 1 << 30
    """Bytes of trajectories admitted but not yet consumed; admission waits above it."""
    segment_bytes: Positive = 64 << 20
    keep: str = "all"
    """Trajectories that stay after they were trained on: `all`, those of the last steps (`steps:100`), or so many bytes
    (`bytes:50000000000`). What a checkpoint needs always stays."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"all|(steps|bytes):[1-9]\d*", self.keep):
            raise ValueError(f"keep={self.keep!r} must be all, steps:N or bytes:N, such as steps:100")

    @property
    def kept_steps(self) -> int | None:
        return self._kept("steps")

    @property
    def kept_bytes(self) -> int | None:
        return self._kept("bytes")

    def _kept(self, unit: str) -> int | None:
        name, _, number = self.keep.partition(":")
        return int(number) if name == unit else None


NAME_BYTES = 64
"""Of a run's name, at most: each file of its trajectories begins with it."""


class Recovery(Settings, frozen=True):
    """What happens when a process dies."""

    max_restarts: Natural = 3
    """How often one engine is started again while the others go on, and how often the run starts again from its last
    checkpoint when the trainer or the buffer dies; 0: the run stops, to be resumed by hand."""
    timeout_s: AboveZero = 600.0
    """For an engine to come back."""
    grace_s: AboveZero = 30.0
    """For the run to write a checkpoint and end after SIGTERM or SIGINT; then its process is ended."""


class EventLog(Settings, frozen=True):
    """`events.jsonl` of a run."""

    max_bytes: Positive = 256 << 20
    """Above it the older half of the spans and other events of each step is deleted; the rest stays."""


class Checkpoints(Settings, frozen=True):
    """Training checkpoints."""

    every: Natural = 20
    """Steps between two checkpoints; 0 keeps only the last step's."""
    last: bool = True
    """One after the last step as well. Off, for measurements: those of a big model take longer than many steps."""
    keep: Positive = 2


SCORES = ("sampled", "greedy", "reward", "passed")
"""Of an evaluation, those that a checkpoint can be the best by."""


class Suite(Settings, frozen=True):
    """More prompts to evaluate on: another source, with a reward of its own."""

    name: str
    task: TaskSettings
    reward: Reward | None = None
    """None: the one that comes with the task, or else the run's."""
    prompts: Positive = 256


class Evaluation(Settings, frozen=True):
    """Held-out evaluation, sampled and greedy."""

    every: Natural = 0
    """Steps between two evaluations; the first and the last step are always evaluated."""
    prompts: Natural = 256
    samples: Positive = 1
    """Sampled completions of each prompt: `sampled` is their mean (avg@k), `passed` the share of prompts with a right
    one (pass@k)."""
    right_from: float = 1.0
    """A completion counts as right from this reward on."""
    suites: tuple[Suite, ...] = ()
    """Evaluated along."""
    beside: bool = False
    """On an engine of its own, which keeps one version meanwhile, while training goes on."""
    best: str = ""
    """A score, such as sampled, greedy or reward, or NAME.sampled of a suite: the weights that had the highest are kept
    in `best/` of the run's directory."""


class Run(Settings, frozen=True):
    """Everything a run needs to be repeated."""

    name: str = "run"
    root: str = "runs"
    """The run directory is `root/name`."""
    seed: Natural = 0
    steps: Positive = 100
    max_staleness: Natural = 2
    """Oldest policy version, counted back from the trainer's, that may be trained on; 0 is synchronous."""
    staleness: StalenessControl = FixedStaleness()
    """Use all of `max_staleness`, or move below it to hold the off-policy figures in a band."""
    pipeline: str = DEFAULT_PIPELINE
    """How the actors work together: `async_grpo`, or a class of your own, as path/to/file.py:Class."""
    cluster: str = "local"
    """`local` starts Ray here, `auto` or an address attaches, `inprocess` runs without Ray."""
    engine: EngineSettings = NativeEngine()
    algorithm: Algorithm = Grpo()
    correction: Correction = Importance()
    drafter: DrafterSettings = NoDrafter()
    model: ModelSource = WarmStart()
    task: TaskSettings = ChainsTask()
    curriculum: Curriculum = Curriculum()
    sft: Sft = Sft()
    """Examples for `pipeline=sft`."""
    reward: Reward = Reward()
    environment: Environment = Environment()
    agent: Agent = Agent()
    stages: Stages = ()
    """Filters and judges between the reward and the buffer, in this order."""
    teachers: tuple[Teacher, ...] = ()
    """Models whose log-probabilities of the sampled tokens are learned from; with them a run is a distillation."""
    distill: Distillation = Distillation()
    rollout: Rollout = Rollout()
    elastic: Elastic = Elastic()
    concurrency: Concurrency = Concurrency()
    placement: Placement = Placement()
    flow: Flow = Flow()
    trainer: Trainer = Trainer()
    sentinel: Sentinel = Sentinel()
    weights: Weights = Weights()
    recovery: Recovery = Recovery()
    buffer: Buffer = Buffer()
    checkpoint: Checkpoints = Checkpoints()
    events: EventLog = EventLog()
    evaluation: Evaluation = Evaluation()
    trackers: tuple[TrackerName, ...] = ()
    """Where figures go besides the run's directory."""
    project: str = "asyncrl"
    """What trackers show the run under."""

    @property
    def replays_routes(self) -> bool:
        """Whether routes are recorded and replayed, if the model has experts: transformers takes none, and neither
        episodes of a harness nor data have any."""
        wanted, always = self.rollout.router_replay, self.engine.returns_routes == "always"
        wants = wanted == "on" or (wanted == "auto" and always)
        return wants and self.model.backend != "transformers" and not (self.agent.on or self.algorithm.on_data)

    @property
    def hidden_states_from(self) -> frozenset[Source]:
        """Who gives a drafter that learns the hidden states of completions. A trainer has those of prompts too, without
        which a head learns less; where its ranks cut completions the engine gives them, if it can. An episode of a
        harness is many calls to an engine."""
        head = self.drafter.head
        if head is None or not head.training.on:
            return frozenset()
        match head.training.source:
            case "both":
                return frozenset(("trainer", "rollout"))
            case "auto":
                cut = self.trainer.context_degrees[-1] > 1
                able = self.engine.gives_hidden_states and not self.agent.on
                return frozenset(("rollout" if cut and able else "trainer",))
            case source:
                return frozenset((source,))

    @property
    def shares_gpu(self) -> bool:
        """Whether several ranks of the trainer may lie on one GPU."""
        return self.placement.share_gpu and self.trainer.ranks > 1 and self.trainer.device != "cpu"

    @property
    def engines(self) -> int:
        """To begin with, the one for evaluations among them."""
        return self.rollout.replicas + self.evaluation.beside

    @property
    def most_tokens(self) -> int:
        """Of a completion, or of a whole example of a supervised start."""
        return self.sft.max_length if self.sft.on else self.rollout.max_tokens

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards teach anything; in a pure distillation they are only recorded."""
        return not self.teachers or self.distill.reward > 0

    @property
    def applied_correction(self) -> Correction:
        """`correction`, but none where all that is learned from is the divergence from a teacher: it does not depend on
        which token was sampled, so there is nothing to weigh, and no sample is too old."""
        return self.correction if self.learns_from_rewards or not self.distill.top_k else NO_CORRECTION

    @property
    def samples_per_step(self) -> int:
        return self.flow.groups_per_step * self.rollout.group_size

    @property
    def capacity_groups(self) -> int:
        """Groups that can be admitted and not yet trained on."""
        return (self.max_staleness + 1) * self.flow.groups_per_step


BEFORE: dict[str, dict[str, Any]] = {"trainer": {"shorten_momentum": False}, "rollout": {"router_replay": "off"}}
"""What runs did before there was a setting for it, where its default is something else."""


def load(raw: Mapping[str, Any], *, recorded: bool = False) -> Run:
    """Turn composed YAML into a checked Run, or raise ConfigError with the path of what is wrong.

    A `recorded` run names every setting that there was. One that it lacks is newer, and has the value that repeats the
    run. Its settings may also be such that it cannot learn: older versions did not refuse them.
    """
    if unknown := unknown_keys(raw, Run):
        raise ConfigError("\n".join(unknown))
    if recorded:
        raw = _as_recorded(raw)
    try:
        run = msgspec.convert(raw, Run)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(error, raw, Run)) from None
    check(run, recorded=recorded)
    return run


def _as_recorded(raw: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(raw)
    for name, values in BEFORE.items():
        given: Any = raw.get(name, {})
        if isinstance(given, Mapping):  # else what is wrong with it is said later
            found[name] = {**values, **given}
    return found


def check(run: Run, *, recorded: bool = False) -> None:
    """Refuse settings that contradict each other, before anything is started."""
    _check_pipeline(run)
    if not recorded:
        _check_signal(run)
    if run.flow.groups_per_take > run.flow.groups_per_step:
        raise ConfigError(
            f"flow.groups_per_take={run.flow.groups_per_take} is more than flow.groups_per_step="
            f"{run.flow.groups_per_step}: a step could never begin; lower flow.groups_per_take"
        )
    if run.flow.max_ready_groups != "auto" and 0 < run.flow.max_ready_groups < run.flow.groups_per_take:
        raise ConfigError(
            f"flow.max_ready_groups={run.flow.max_ready_groups} is less than flow.groups_per_take="
            f"{run.flow.groups_per_take}: the trainer would wait forever; raise it, or set auto, or 0 for no such limit"
        )
    _check_incomplete(run)
    _check_evaluation(run)
    if run.algorithm.dynamic_sampling and run.rollout.group_size == 1:
        raise ConfigError(
            "algorithm.dynamic_sampling=true drops groups of equal rewards, and with rollout.group_size=1 that is "
            "every group: raise rollout.group_size, or set algorithm.dynamic_sampling=false"
        )
    if run.algorithm.kl.placement == "reward" and not run.algorithm.kl_in_reward:
        members: tuple[type[AlgorithmBase], ...] = get_args(Algorithm)
        able = " or ".join(sorted(str(each.__struct_config__.tag) for each in members if each.kl_in_reward))
        raise ConfigError(
            f"algorithm.kl.placement=reward is not for algorithm={run.algorithm.kind}; use "
            f"algorithm.kl.placement=loss, or algorithm={able}"
        )
    _check_normalized_weights(run)
    _check_on_data(run)
    check_sft(run)
    check_precision(run)
    _check_drafter(run)
    check_weights(run)
    check_pool(run)
    check_trainer(run)
    check_reward(run)
    check_judge(run)
    check_environment(run)
    check_agent(run)
    check_distillation(run)
    if run.rollout.system and not run.rollout.chat:
        raise ConfigError("rollout.system is the system message of a chat: set rollout.chat=true, or leave it out")
    run.task.check(run)
    check_curriculum(run)
    if not run.name or "/" in run.name or run.name.startswith("."):
        raise ConfigError(f"name={run.name!r} must be a plain directory name, such as name=my-run")
    if len(run.name.encode()) > NAME_BYTES:
        raise ConfigError(
            f"name={run.name} has {len(run.name.encode())} bytes; files of a run name it with "
            f"{NAME_BYTES} at most, so choose a shorter one"
        )


def _check_pipeline(run: Run) -> None:
    if run.pipeline not in PIPELINES and ":" not in run.pipeline:
        raise ConfigError(
            f"pipeline={run.pipeline} does not exist: {did_you_mean(run.pipeline, PIPELINES)}, or name a class of your "
            "own: pipeline=path/to/file.py:Class"
        )
    if run.pipeline not in PIPELINES:
        return
    if run.pipeline == "distill" and not run.teachers:
        raise ConfigError(
            "pipeline=distill has no teacher: name a model directory, as in teachers=[{path: models/big}]"
        )
    supervised = run.pipeline == "sft"
    if supervised != run.sft.on:
        raise ConfigError(
            "pipeline=sft has no examples: set sft.path to a file of them"
            if supervised
            else f"sft.path={run.sft.path} is for a supervised start: set pipeline=sft"
        )
    if bool(run.rollout.replicas) == supervised:
        way_out = "0, since nothing is generated" if supervised else "1 or more, or nobody generates"
        raise ConfigError(f"rollout.replicas={run.rollout.replicas} with pipeline={run.pipeline}: set {way_out}")


def _check_evaluation(run: Run) -> None:
    found, names = run.evaluation, [suite.name for suite in run.evaluation.suites]
    known = [*SCORES, *(f"{name}.{score}" for name in names for score in SCORES)]
    if len(set(names)) < len(names) or any(not re.fullmatch(r"[a-z0-9_]{1,40}", name) for name in names):
        raise ConfigError(
            f"evaluation.suites: {', '.join(names)}: each has a name of its own, of small letters, digits and _"
        )
    if judged := [suite.name for suite in found.suites if suite.reward is not None and suite.reward.judge.on]:
        raise ConfigError(
            f"evaluation.suites: {', '.join(judged)}: only the run's own reward may have a judge; give it a function"
        )
    if found.best and found.best not in known:
        raise ConfigError(f"evaluation.best={found.best} is not evaluated: {did_you_mean(found.best, known)}")
    if found.best and not found.prompts:
        raise ConfigError("evaluation.best needs evaluations: set evaluation.prompts above 0")
    if found.beside and (run.weights.delta or run.weights.traits.one_gpu_per_engine):
        field = "delta=true" if run.weights.delta else f"transport={run.weights.transport}"
        raise ConfigError(
            f"evaluation.beside=true sends a version to one engine alone, and weights.{field} sends it to all: use "
            "weights.transport=auto with weights.delta=false, or evaluation.beside=false"
        )


def _check_incomplete(run: Run) -> None:
    least, size = run.flow.incomplete_min, run.rollout.group_size
    if run.flow.incomplete == "drop":
        return
    if least > size:
        raise ConfigError(
            f"flow.incomplete_min={least} is more than rollout.group_size={size}, so every group that lacks a sample "
            f"would be dropped; lower flow.incomplete_min, or set flow.incomplete=drop"
        )
    if least < 2 and run.algorithm.compares_within_group and run.learns_from_rewards:
        raise ConfigError(
            f"flow.incomplete_min={least} leaves algorithm={run.algorithm.kind} groups of one sample, with nothing to "
            "compare it with; set flow.incomplete_min=2 or more"
        )


def _check_signal(run: Run) -> None:
    """Refuse settings with which every advantage is 0 or nothing is explored."""
    if not (run.engine.has_model and run.algorithm.needs_advantages):
        return
    if run.rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature=0 always takes the likeliest token: all samples of a group are the same, and nothing "
            "can be learned from them; set rollout.temperature=1 (evaluations measure greedy decoding in any case)"
        )
    if run.rollout.top_k == 1:
        raise ConfigError(
            "rollout.top_k=1 always takes the likeliest token, which then has probability 1: nothing can be learned "
            "from it; set rollout.top_k=0 for all tokens, or 2 and more"
        )
    if run.rollout.group_size == 1 and run.algorithm.compares_within_group and run.learns_from_rewards:
        if run.teachers:
            raise ConfigError(
                f"rollout.group_size=1 gives algorithm={run.algorithm.kind} nothing to compare the reward of a sample "
                f"with, and distill.reward={run.distill.reward:g} asks for that: set rollout.group_size=2 or more, or "
                "distill.reward=0"
            )
        members: tuple[type[AlgorithmBase], ...] = get_args(Algorithm)
        able = [each() for each in members if each.needs_advantages]
        others = " or ".join(sorted(f"algorithm={each.kind}" for each in able if not each.compares_within_group))
        raise ConfigError(
            f"rollout.group_size=1 gives algorithm={run.algorithm.kind} nothing to compare a sample with: every "
            f"advantage is 0 and nothing is learned; set rollout.group_size=2 or more, or use {others} with "
            "its defaults"
        )


def _check_normalized_weights(run: Run) -> None:
    """The mean weight divides the whole gradient at the step's end, so nothing unweighted may be in it."""
    if run.applied_correction.normalizes_weights and (
        run.algorithm.entropy
        or run.distill.top_k
        or run.algorithm.router_aux_loss
        or (run.algorithm.kl.coefficient and run.algorithm.kl.placement == "loss")
    ):
        raise ConfigError(
            "correction.batch_normalize=true does not go with algorithm.entropy, algorithm.router_aux_loss, a KL "
            "penalty in the loss or distill.top_k, which have no weights; turn one of them off"
        )


def _check_on_data(run: Run) -> None:
    """Refuse what is estimated from samples of the policy, or decided by their rewards: data is neither."""
    algorithm = run.algorithm
    if not algorithm.on_data:
        return
    learns = f"algorithm={algorithm.kind} learns from data"
    if algorithm.dynamic_sampling:
        raise ConfigError(f"algorithm.dynamic_sampling=true: {learns}, which has no rewards to compare; leave it out")
    if algorithm.kl.coefficient:
        raise ConfigError(
            f"algorithm.kl.coefficient={algorithm.kl.coefficient:g}: {learns}, and the penalty is estimated from "
            "tokens that the policy sampled; leave it out"
        )
    if algorithm.overlong.penalty:
        raise ConfigError(
            f"algorithm.overlong.penalty={algorithm.overlong.penalty:g}: {learns}, which has no rewards to take it "
            "from; leave it out"
        )
    if run.correction.functions:
        raise ConfigError(
            f"correction={run.correction.kind}: {learns}, which no policy of the run has sampled; use correction=none"
        )


def _check_drafter(run: Run) -> None:
    drafter, engine = run.drafter.drafting, run.engine
    if drafter is None:
        return
    if not engine.has_model:
        raise ConfigError(
            f"drafter={drafter.kind} has nothing to draft for with engine={engine.kind}; use drafter=none"
        )
    if not engine.verifies_drafts:
        raise ConfigError(
            f"drafter={drafter.kind}: engine={engine.kind} decodes without drafts; use drafter=none, or engine=native "
            "or vllm"
        )
    trees = [strategy for strategy in (drafter.strategy, *drafter.adaptive.strategies) if strategy.is_tree]
    if trees and not engine.checks_trees:
        raise ConfigError(
            f"drafter.top_k={trees[0].top_k} drafts trees, which engine={engine.kind} cannot check; use drafter.top_k=1"
        )
    if (head := drafter.head) is not None and "rollout" in run.hidden_states_from and not engine.gives_hidden_states:
        raise ConfigError(
            f"drafter.training.source={head.training.source}: only engine=native gives hidden states as it decodes, "
            f"and not engine={engine.kind}; use drafter.training.source=trainer"
        )
