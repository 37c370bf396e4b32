"""The learner: groups in, weights out.

`accumulate` runs forward and backward on whatever groups are there and may be called many times per step, while the
rest of the step is still being generated. `step` divides the summed gradient by the token count of the whole step and
updates once. The result is that of one batch over all the groups, whatever the order and sizes of the calls.
An algorithm whose advantages depend on the whole step only collects its groups, and does everything in `step`.
Of several ranks each has a learner, which is given all groups and works on its own share of them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.algorithms import losses, registry
from asyncrl.algorithms.advantages import towards_teacher
from asyncrl.algorithms.base import Samples, Tokens
from asyncrl.algorithms.corrections import Caution, Corrected, of_data
from asyncrl.config import Run
from asyncrl.config.trainer import Trainer
from asyncrl.errors import AsyncRLError, ConfigError, RankError
from asyncrl.models import lora
from asyncrl.models.checkpoint import empty_policy
from asyncrl.models.degrees import check_degrees
from asyncrl.models.execution import Execution
from asyncrl.models.experts import Routing
from asyncrl.models.names import hf_tensors
from asyncrl.models.packed import uses_flash
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import RouteShape, replayed_shape
from asyncrl.system.compiler import compiles
from asyncrl.training import memory
from asyncrl.training.adamw import AdamW
from asyncrl.training.advantages import TokenAdvantages, with_advantages
from asyncrl.training.batches import Block, PackedBatch, block, by_degree, share
from asyncrl.training.critic import Critic
from asyncrl.training.device import training_device
from asyncrl.training.diagnostics import (
    Observed,
    RankStats,
    Ratios,
    figures,
    late,
    load_figures,
    most_off_policy,
    of_all,
    shares,
)
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.distributed.shards import fill
from asyncrl.training.export import Export
from asyncrl.training.forward import PolicyForward
from asyncrl.training.guardrails import alarms
from asyncrl.training.hidden_capture import HiddenTap
from asyncrl.training.host_copies import on_host
from asyncrl.training.momentum import Momentum
from asyncrl.training.report import OffPolicy, StepReport
from asyncrl.types import Group, Trajectory
from asyncrl.weights.gather import OneRank, Source

log = logging.getLogger(__name__)

MEANS = (
    "entropy",
    "reference_kl",
    "teacher_kl",
    "teacher_divergence",
    "outside_support",
    "route_mismatch",
    "router_aux_loss",
)
"""Sums over tokens that a report has the mean of, where there are any."""


def learning_rate(settings: Trainer, step: int, steps: int) -> float:
    """Of the `step`-th step, from 0, of `steps`: warm-up, constant, decay. No step of the run has 0."""
    grown = (step + 1) / settings.warmup_steps if settings.warmup_steps else 1.0
    left = (steps - step) / (settings.decay_steps + 1) if settings.decay_steps else 1.0
    return settings.lr * max(0.0, min(1.0, grown, left))


class Learner:
    """Fp32 master weights, AdamW, one optimizer step per quota of groups."""

    def __init__(self, model_path: Path, run: Run, ranks: Ranks | None = None) -> None:
        self._run, self._settings, self._algorithm = run, run.trainer, run.algorithm
        self.ranks, self.lora = ranks or Ranks(), run.trainer.lora
        self._entry = registry.entry(run.algorithm)
        self.device = training_device(run.trainer.device)
        narrow, adapts = run.trainer.dtype == "bf16", run.trainer.lora.rank > 0
        in_halves = narrow and not adapts and self.ranks.world == 1
        if in_halves:  # `fill` reads fp32 masters, and the optimizer keeps what bf16 has no room for
            self.model = empty_policy(model_path, run.model.backend, torch.bfloat16).to(self.device)
        else:  # weights that are not trained need no masters
            held = torch.bfloat16 if narrow and adapts else torch.float32
            self.model = self._load(model_path, held, adapt=adapts)
        self.model_config = self.model.config
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._execution = self._choose_execution()
        self.optimizer = self._make_optimizer()
        if in_halves:
            self.fill(model_path)
        self._choose_packing()
        self._execution = self._execution._replace(their_layers=self._compiles_their_layers())
        self.outgoing = Export(self.model, self.ranks, adapted=adapts, master=self._master)
        self._routes = replayed_shape(run, self.model_config)
        self._policy = PolicyForward(self.model, run, self._execution, RouteShape.of(self.model_config))
        self._reference = self._make_reference(model_path)
        self.critic = None
        if (rate := run.algorithm.critic_rate) is not None:
            self.critic = Critic(model_path, self.model, rate, run.trainer, self.device, self.ranks, self._execution)
        self.hidden: HiddenTap | None = None
        """Where hidden states for a drafter go, if there is one."""
        self.version, self.caution = 0, Caution(run.applied_correction)
        self.momentum = Momentum(run.trainer.beta1, shortened=run.trainer.shorten_momentum)
        self._reset()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """torch's own where all of it is fp32 and in one place, which repeats older runs to the bit; else ours."""
        settings = self._settings
        narrow = any(parameter.dtype != torch.float32 for parameter in self._trained)
        if not narrow and settings.optimizer == "adamw" and settings.offload == "none":
            betas = settings.beta1, settings.beta2
            return torch.optim.AdamW(
                self._trained, lr=settings.lr, betas=betas, weight_decay=settings.weight_decay, fused=True
            )
        if settings.offload != "none" and self.device.type == "cpu":
            raise ConfigError(f"trainer.offload={settings.offload} needs a GPU, and there is none here; set it to none")
        return AdamW(
            self._trained,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            eight_bit=settings.optimizer == "adamw_8bit",
            offload=settings.offload == "optimizer",
            compile=self._execution.compiled,
        )

    def _master(self, parameter: nn.Parameter) -> Tensor:
        return self.optimizer.master(parameter) if isinstance(self.optimizer, AdamW) else parameter.detach()

    def fill(self, directory: Path) -> None:
        """Read the master weights from a checkpoint in Hugging Face layout."""
        write = self.optimizer.set_master if isinstance(self.optimizer, AdamW) else None
        fill(self.model, directory, self.ranks, write)

    def _make_reference(self, model_path: Path) -> PolicyForward | None:
        if not self._algorithm.kl.coefficient:
            return None
        model = self._load(model_path, self.model.dtype)
        model.packing = self.model.packing
        return PolicyForward(model.requires_grad_(False), self._run, self._execution)

    def _load(self, path: Path, dtype: torch.dtype, *, adapt: bool = False) -> PolicyModel:
        model = self.ranks.load(path, self._run.model.backend, self.device, dtype)
        check_degrees(self._settings, model.config)
        if adapt:
            lora.attach(model, self.lora, self._run.seed)
        self.ranks.shard(model, model, path, torch.bfloat16 if self._settings.dtype == "bf16" else torch.float32)
        return model

    def _choose_packing(self) -> None:
        """Where it has to be tried, and then every rank has to find the same: all cut a step into the same batches."""
        if self.model.packing == "shared":
            return
        found = self.model.try_out(narrow=self._settings.dtype == "bf16")
        self.ranks.settle(self.model)
        why_not = next(filter(None, self.ranks.exchange(found.encode())), b"").decode()
        self.model.packing = "padded" if why_not else "packed"
        if self.ranks.rank == 0:
            rows = f"in padded rows: {why_not}" if why_not else "packed into rows"
            name = self.model_config.architecture
            log.log(logging.WARNING if why_not else logging.INFO, "%s through transformers, samples %s", name, rows)

    def _compiles_their_layers(self) -> bool:
        """Not every family's code can be compiled, which is tried unless it is asked for. With several ranks none is
        tried: one that failed alone would leave the others waiting for its part of the weights."""
        if self._settings.compile == "on" or not self._execution.compiled or self.ranks.world > 1:
            return self._settings.compile == "on"
        if why_not := self.model.try_to_compile(narrow=self._settings.dtype == "bf16"):
            name = self.model_config.architecture
            log.warning("layers of %s cannot be compiled, which makes training slower: %s", name, why_not)
        return not why_not

    def _choose_execution(self) -> Execution:
        card = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else None
        compile = compiles(self._settings.compile, self.device.type)
        whole = self.model_config.experts is None and self.model_config.backend == "native"
        flash = uses_flash(self.device, self._settings.dtype == "bf16") and whole
        fused = compile and flash and max(self.ranks.contexts) == 1
        again = memory.recomputed_layers(self._run, self.model_config, card, compiled=fused)
        return Execution(again, compile, flash)

    def _reset(self) -> None:
        self._samples = self._tokens = 0
        self._loss = 0.0
        self._counted: dict[str, float | Tensor] = {}
        """On the device: reading them waits for it."""
        self._sums: dict[str, float] = {}
        """The same at the end of the step."""
        self._expert_load: Tensor | None = None
        """How often each expert of each layer was chosen; None without experts."""
        self._observed: list[Observed] = []
        self._ratios: list[Ratios] = []
        self._off_policy: OffPolicy | None = None
        self._held: list[Group] = []
        self._fault = ""
        self.momentum.begin()
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Forward and backward; gradients add up until `step`."""
        self._samples += sum(len(group.trajectories) for group in groups)
        self._tokens += sum(t.sampled_tokens for group in groups for t in group.trajectories)
        if self.ranks.world > 1:
            self._compare_samples(groups)
        if not self._algorithm.on_data:
            self.momentum.observe((t for group in groups for t in group.trajectories), self.version)
        if self._left_out:
            return
        if self._entry.whole_step:
            self._held.extend(groups)
        else:
            self._learn(groups)

    def age(self, trajectory: Trajectory) -> int:
        """Versions between the weights that sampled its oldest token and those that are trained; data has none."""
        return 0 if self._algorithm.on_data else max(0, self.version - trajectory.oldest_version)

    def _compare_samples(self, groups: Sequence[Group]) -> None:
        """RankError, on every rank, unless all have the same: else some would wait for what others never compute."""
        checksum = 0
        for trajectory in (t for group in groups for t in group.trajectories):
            checksum = crc32(trajectory.tokens.tobytes(), checksum)
        first, *others = self.ranks.exchange(str(checksum).encode())
        if differing := [str(rank) for rank, given in enumerate(others, 1) if given != first]:
            raise RankError(
                f"the trainer's ranks were given other samples than rank 0: {', '.join(differing)} of "
                f"{self.ranks.world}; resume the run from its last checkpoint"
            )

    def _learn(self, groups: Sequence[Group]) -> None:
        batches = self._batches(with_advantages(self._run, groups, self._routes))
        if self._entry.whole_step:
            credit = TokenAdvantages(self._algorithm, self._policy, self._reference, self.critic, self.ranks)
            batches = credit.assign(batches)
        for batch in batches if self._trains_policy else ():
            self._backward(batch)

    def _batches(self, blocks: Sequence[Block]) -> list[PackedBatch]:
        """This rank's, on its device."""
        found: list[PackedBatch] = []
        ranks, budget = self.ranks, self._settings.token_budget
        for degree, chosen in by_degree(blocks, budget, ranks.contexts).items():
            own = share(chosen, degree * budget, ranks.rank // degree, ranks.world // degree, self.model.packing)
            group = ranks.contexts[degree]
            found += own if group is None else [batch.shared(group) for batch in own]
        return [batch.to(self.device) for batch in found]

    @property
    def _left_out(self) -> bool:
        """Whether the settings say that nothing is learned from this step."""
        return self.version + 1 in self._run.sentinel.skip_steps

    @property
    def _trains_policy(self) -> bool:
        """Not while the critic is trained alone."""
        return self.version >= self._algorithm.policy_from_step

    def _backward(self, batch: PackedBatch) -> None:
        if batch.idle:
            return self._take_part(batch)
        divergence = self._run.distill.top_k > 0
        output = self._policy(batch, entropy=self._algorithm.entropy > 0, divergence=divergence, tap=self.hidden)
        age_L = (self.version - batch.version_L).clamp(min=0) * (not self._algorithm.on_data)
        samples = Samples(batch.sample_L, len(batch.answers), age_L)
        corrected = self._correct(output.logp_L, batch, samples)
        advantage_L = self._advantages(batch, output.logp_L.detach())
        tokens = Tokens(output.logp_L, corrected.proximal_logp_L, advantage_L, samples)
        loss = self._entry.loss(self._algorithm, tokens)
        loss_L, signal_L = corrected.weight_L * loss.loss_L, advantage_L.abs()
        if output.divergence_L is not None:  # not weighted: it does not depend on which token was sampled
            loss_L = loss_L + self._run.distill.coefficient * output.divergence_L
            signal_L = signal_L + output.divergence_L.detach()
            self._add(batch, {"teacher_divergence": output.divergence_L.detach().sum()})
        if self._reference is not None and self._algorithm.kl.placement == "loss":
            with torch.no_grad():
                reference_L = self._reference(batch).logp_L
            penalty_L = losses.kl(self._algorithm.kl.estimator, output.logp_L, reference_L)
            loss_L = loss_L + self._algorithm.kl.coefficient * penalty_L
            self._add(batch, {"reference_kl": penalty_L.detach().sum()})
        if output.entropy_L is not None:
            loss_L = loss_L - self._algorithm.entropy * output.entropy_L
            self._add(batch, {"entropy": output.entropy_L.detach().sum()})
        if output.outside_L is not None:
            self._add(batch, {"outside_support": output.outside_L.sum()})
        aux = self._observe_routing(batch, output.routing) if output.routing is not None else None
        self._add(batch, loss.sums | {"informative": (samples.max(signal_L) > 0).sum()})
        self._observe(batch, corrected, samples)
        self._accumulate_gradient(batch, output.logp_L, self._scaled(loss_L, samples), samples, aux)

    def _correct(self, logp_L: Tensor, batch: PackedBatch, samples: Samples) -> Corrected:
        if self._algorithm.on_data:
            return of_data(logp_L)
        return registry.correct(self._run.applied_correction, logp_L, batch.behaviour_logp_L, samples)

    def _advantages(self, batch: PackedBatch, logp_L: Tensor) -> Tensor:
        """With teachers, of each token by what they and the policy of this moment think of it: a sample may be old."""
        if batch.teacher_logp_L is None:
            return batch.advantage_L
        self._add(batch, {"teacher_kl": (logp_L - batch.teacher_logp_L).sum()})
        if self._run.distill.top_k:  # what the teacher says is the divergence in the loss
            return self._run.distill.reward * batch.advantage_L
        return towards_teacher(self._run.distill, batch.advantage_L, logp_L, batch.teacher_logp_L)

    def _observe_routing(self, batch: PackedBatch, routing: Routing) -> Tensor | None:
        """What the load-balancing loss, if there is one, adds to the loss of the batch."""
        load_N_X, rerouted_L, balance = routing
        if batch.reports:
            self._expert_load = load_N_X if self._expert_load is None else self._expert_load + load_N_X
        if rerouted_L is not None:
            self._add(batch, {"route_mismatch": rerouted_L.sum()})
        if balance is None:
            return None
        tokens = len(batch.target_L)
        self._add(batch, {"router_aux_loss": tokens * balance.detach()})
        # By its part of what the sum over the step is divided by, so that the step has the mean over its batches.
        part = tokens if self._algorithm.aggregation == "token" else len(batch.answers)
        return self._algorithm.router_aux_loss * part * balance

    def _take_part(self, batch: PackedBatch) -> None:
        """Run the same forwards and backward as ranks that have samples: collectives need every rank."""
        logp_L = self._policy(batch).logp_L
        if self._reference is not None and self._algorithm.kl.placement == "loss":
            with torch.no_grad():
                self._reference(batch)
        (logp_L.sum() * 0).backward()

    def _scaled(self, loss_L: Tensor, samples: Samples) -> Tensor:
        match self._algorithm.aggregation:
            case "token":
                return loss_L
            case "sequence":
                return loss_L / samples.spread(samples.lengths)
            case "constant":
                return loss_L / self._run.rollout.max_tokens

    def _accumulate_gradient(
        self, batch: PackedBatch, logp_L: Tensor, loss_L: Tensor, samples: Samples, aux: Tensor | None
    ) -> None:
        """A loss that is not finite taints the step, but not the gradients; the samples that made it are named."""
        total = loss_L.sum() if aux is None else loss_L.sum() + aux
        value = float(total.detach())
        if np.isfinite(value):
            total.backward()
            self._loss += value * batch.reports
            return
        if self.ranks.world > 1:  # the others are in the backward already
            (logp_L.sum() * 0).backward()
        bad_S = samples.sum((~loss_L.detach().isfinite()).float()) > 0
        slots = [f"{a.slot.group}/{a.slot.sample}" for a, bad in zip(batch.answers, bad_S.tolist(), strict=True) if bad]
        self._fault = f"the loss of samples {', '.join(slots[:8])} is not finite"

    def _observe(self, batch: PackedBatch, corrected: Corrected, samples: Samples) -> None:
        if not batch.reports:
            return
        precisions = [answer.precision for answer in batch.answers]
        self._observed.append(Observed.of(corrected, samples, precisions))
        self._ratios.append(Ratios(corrected.log_rho_L, samples, [answer.slot for answer in batch.answers]))
        if self._run.applied_correction.normalizes_weights:
            self._add(batch, {"weight": corrected.weight_L.sum(), "kept": corrected.kept_L.sum()})

    def _add(self, batch: PackedBatch, sums: dict[str, float | Tensor]) -> None:
        for name, value in sums.items() if batch.reports else ():
            self._counted[name] = self._counted.get(name, 0.0) + value

    def step(self, guard: Callable[[StepReport], StepReport] | None = None) -> StepReport:
        """One optimizer update from everything accumulated since the last. `guard` sees the report before anything
        changes: where it raises, weights, optimizer and version stay what they were, and can be saved."""
        if self._held:
            self._learn(self._held)
        self._sums = {name: float(value) for name, value in self._counted.items()}
        self._off_policy = most_off_policy(self._ratios)
        self._combine_ranks()
        if self._left_out:
            self._fault = "sentinel.skip_steps names it"
        trains = self._trains_policy and not self._left_out
        norm = self._gradient() if trains else 0.0
        if not self._fault and not np.isfinite(norm):
            self._fault = f"the gradient of {self._samples} samples is not finite"
        found, least = figures(self._observed), self.caution.least
        found["lr_scale"] = self.caution.scale(found["drift"], late=late(self._observed))
        found["momentum"] = self.momentum.beta1
        if trains and self._algorithm.needs_advantages:
            found["informative_fraction"] = self._sums.get("informative", 0.0) / max(self._samples, 1)
        report = self._report(norm, found)
        try:
            report = report if guard is None else guard(report)
        except AsyncRLError:
            self._drop_step(least)
            raise
        if trains and not self._fault:  # else weight decay would move it, and momentum begin to count
            self._update(learning_rate(self._settings, self.version, self._run.steps) * found["lr_scale"])
        if self.critic is not None:
            report.figures.update(self.critic.step(self._tokens, frozen=bool(self._fault)))
        if self.device.type == "cuda":
            report.figures["trainer_peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self.device))
        self.version += 1
        self._reset()
        if self.hidden is not None:
            self.hidden.begin_step(self.version)
        return report

    def _update(self, rate: float) -> None:
        group = self.optimizer.param_groups[0]
        group["betas"] = self.momentum.beta1, self._settings.beta2
        group["lr"] = rate * self.momentum.applied(self._updates + 1)
        self.optimizer.step()

    @property
    def _updates(self) -> int:
        """That the optimizer has made: skipped steps are none."""
        return int(self.optimizer.state[self._trained[0]].get("step", 0))

    def _drop_step(self, least: float) -> None:
        """Forget what was accumulated, and what the step has shown."""
        self.caution.least = least
        if self.critic is not None:
            self.critic.step(self._tokens, frozen=True)
        self._reset()

    def _combine_ranks(self) -> None:
        """From here on every rank has the figures of the whole step."""
        if self.ranks.world == 1:
            return
        critic_loss = self.critic.loss if self.critic is not None else 0.0
        mine = RankStats(
            self._loss,
            critic_loss,
            self._fault,
            self._sums,
            self._observed,
            self._off_policy,
            self._expert_load,
            mismatch=self.ranks.mismatch(),
        )
        found = of_all(self.ranks, mine)
        self._loss, self._fault, self._sums, self._observed = found.loss, found.fault, found.sums, found.observed
        self._off_policy, self._expert_load = found.off_policy, found.expert_load
        if self.critic is not None:
            self.critic.loss = found.critic_loss
        self.settle()

    def settle(self) -> None:
        """Before weights are read or written."""
        self.ranks.settle(self.model)
        if self.critic is not None:
            self.ranks.settle(self.critic)

    def _gradient(self) -> float:
        """Turn the sum into a mean, clip it, and return its norm."""
        denominator = self._denominator() / self.ranks.world  # of ranks the mean is there already
        if isinstance(self.optimizer, AdamW):
            return float(self.optimizer.average_gradients(denominator, self._settings.grad_clip))
        for parameter in self._trained:
            if parameter.grad is None:  # every advantage was 0: Adam still moves by its momentum, as one batch would
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.combine(self._trained)
        for parameter in self._trained:
            assert parameter.grad is not None
            parameter.grad.div_(denominator)
        return self.ranks.clip(self._trained, self._settings.grad_clip)

    def _denominator(self) -> float:
        """Tokens or samples of the step; with `batch_normalize` times the mean weight of what was kept."""
        weight = self._sums["weight"] / max(self._sums["kept"], 1.0) if "weight" in self._sums else 1.0
        return max(self._tokens if self._algorithm.aggregation == "token" else self._samples, 1) * (weight or 1.0)

    def _report(self, norm: float, found: dict[str, float]) -> StepReport:
        measured = max(sum(part.columns_5_L.shape[1] for part in self._observed), 1)
        found["clip_fraction"] = self._sums.get("clipped", 0.0) / measured
        found |= {name: self._sums[name] / measured for name in MEANS if name in self._sums}
        if self._expert_load is not None:
            found |= load_figures(self._expert_load)
        return StepReport(
            version=self.version + 1,
            samples=self._samples,
            tokens=self._tokens,
            loss=self._loss / self._denominator(),
            grad_norm=norm,
            skipped=bool(self._fault),
            fault=self._fault,
            figures=found,
            shares=shares(self._observed),
            off_policy=self._off_policy,
            alarms=alarms(found),
        )

    @torch.no_grad()
    def loss(self, trajectories: Sequence[Trajectory]) -> float:
        """Mean of - log pi over the sampled tokens, of which nothing is learned. Every rank makes the same call."""
        groups = [Group(id=number, trajectories=(each,)) for number, each in enumerate(trajectories)]
        own = 0.0
        for batch in self._batches([block(group, [0.0]) for group in groups]):
            logp_L = self._policy(batch).logp_L
            if not batch.idle and batch.reports:
                own -= float(logp_L.sum(dtype=torch.float64))
        self.settle()
        total = sum(float(each) for each in self.ranks.exchange(repr(own).encode()))
        return total / max(sum(each.sampled_tokens for each in trajectories), 1)

    def token_logprobs(self, batch: PackedBatch) -> Tensor:
        return self._policy(batch).logp_L

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The master weights under their Hugging Face names."""
        return self.outgoing.tensors()

    def copies(self) -> Iterator[tuple[str, Tensor]]:
        """The same as copies in the host's memory, for which the card needs no room. One rank only."""
        own = self.optimizer
        return self.outgoing.copies(own.master_copy if isinstance(own, AdamW) else on_host)

    def served_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The same as engines get them; in bf16 these are the very numbers that training computes with."""
        if self.model.dtype == dtype and not self.lora.rank:
            return hf_tensors(self.model)
        return ((name, tensor.to(dtype)) for name, tensor in self.tensors())

    def source(self, dtype: torch.dtype, *, adapters_only: bool = False) -> Source:
        """The source of a publication; every rank contributes its part."""
        if adapters_only:
            return self.outgoing.adapters()
        one = self.ranks.world == 1
        return OneRank(lambda: self.served_tensors(dtype)) if one else self.outgoing.source(dtype)
