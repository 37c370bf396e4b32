"""The policy as it decodes, and a plain step with it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.drafting.hidden_capture import RolloutTap
from asyncrl.engines.adapters import has_adapters
from asyncrl.engines.native.batch_table import BatchTable, Ended
from asyncrl.engines.native.cpu.cache import KvCache
from asyncrl.engines.native.cpu.hidden_capture import Capture, watch
from asyncrl.engines.native.cpu.layout import decoding_tensors, store_by_columns
from asyncrl.engines.native.cpu.routes import HostRoutes, RouteRecorder
from asyncrl.engines.native.cpu.scheduler import Step
from asyncrl.engines.native.sampling import Column, Purpose, sample
from asyncrl.engines.native.weight_loading import Receiver, load_adapters, load_published, not_in_fp8
from asyncrl.errors import WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.decoder import Tensors
from asyncrl.models.head import fp32_product
from asyncrl.models.layers import NormScale
from asyncrl.models.names import hf_tensors
from asyncrl.models.policy import Taps
from asyncrl.types import WeightManifest


class Policy:
    """The weights, and what follows from them and is made again when they change."""

    def __init__(self, path: Path, dtype: torch.dtype, positions: int, *, keep_output: bool = False) -> None:
        self.model, self.config = load_model(path, dtype)
        self._path, self._positions, self._keep_output = path, positions, keep_output
        self.output_E_V = torch.empty(0)
        """The output matrix as published, in fp32, where it is kept: for decoding it is changed in place."""
        store_by_columns(self.model)
        self._derive()

    def load(self, manifest: WeightManifest, receiver: Receiver) -> str:
        """The published version, laid out for decoding."""
        if manifest.fp8 is not None:
            raise WeightSyncError(not_in_fp8(receiver.engine, manifest.version))
        return self._take(manifest, receiver)

    def _take(self, manifest: WeightManifest, receiver: Receiver) -> str:
        held = dict(hf_tensors(self.model))
        if has_adapters(manifest):
            digest = load_adapters(manifest, held, self._path, receiver)
        else:
            digest = load_published(manifest, held, receiver)
        self._derive()
        return digest

    def logits(self, hidden_T_E: Tensor) -> Tensor:
        return fp32_product(hidden_T_E, self.head_E_V)

    def final(self, hidden_T_E: Tensor) -> Tensor:
        """Hidden states as the model means them: their scale may be a part of the output matrix here."""
        return hidden_T_E if self._scale_E is None else hidden_T_E * self._scale_E

    def _derive(self) -> None:
        if self._keep_output:
            self.output_E_V = self.model.output_matrix.detach().t().to(torch.float32, copy=True).contiguous()
        self.tensors, self.head_E_V = self._lay_out()
        folded = self.tensors.norm.scale is None
        self._scale_E = NormScale.of(self.model.norm.detach(), self.config.norm_eps).scale if folded else None

    def _lay_out(self) -> tuple[Tensors, Tensor]:
        return decoding_tensors(self.model, self._positions)


class Outcome(NamedTuple):
    """What a step has done."""

    sampled: int
    prefilled: int
    ended: Ended
    logprob_sum: float
    """Not a number if any log-probability is none."""


class States(NamedTuple):
    """What a step has computed of its flat tokens."""

    hidden_T_E: Tensor
    """As `Policy.logits` takes them."""
    taps: list[Tensor]
    watch: Capture | None
    routes: RouteRecorder | None


class Decoding(NamedTuple):
    """What every step works on."""

    policy: Policy
    cache: KvCache
    slots: BatchTable
    tap: RolloutTap | None = None
    routes: HostRoutes | None = None

    def plain(self, step: Step) -> Outcome:
        """Every row that catches up gets one token."""
        policy, slots = self.policy, self.slots
        rows = slots.count
        states = self.target(step)
        uniform_N_1 = torch.from_numpy(slots.uniforms_of(Purpose.PLAIN, step.end_N[:, None]))
        token_N_1, logprob_N_1 = sample(policy.logits(states.hidden_T_E[:rows]), slots.settings(), uniform_N_1)
        logprob_N = logprob_N_1.numpy()[:, 0]
        sampled, ended = slots.record(step.end_N, token_N_1.numpy()[:, 0], logprob_N)
        self.give(step, states)
        return Outcome(sampled, len(step.tokens_T) - sampled, ended, float(logprob_N.sum()))

    def target(self, step: Step, wanted: tuple[int, ...] | None = None) -> States:
        """The policy over the tokens of a step; `wanted` are places in the residual stream, () is the end of all."""
        found = watch(self.tap, self.slots.jobs)
        if found is not None:
            wanted = found.tap.layers
        taps = Taps(wanted) if wanted else None
        routes = None if self.routes is None else RouteRecorder(self.routes)
        all_chunks = wanted == () or found is not None or routes is not None
        attend = self.cache.attend(step.layout._replace(all_chunks=all_chunks))
        tokens_T, positions_T = torch.from_numpy(step.tokens_T), torch.from_numpy(step.positions_T)
        hidden_T_E = self.policy.tensors.forward(tokens_T, positions_T, attend, taps, routes)
        return States(hidden_T_E, taps.found_T_E if taps is not None else [], found, routes)

    def give(self, step: Step, states: States, path_N_W: Column | None = None) -> None:
        """To the table its routes, and to the drafter what a recorded step has computed of tapped answers."""
        if states.routes is not None:
            states.routes.keep(step, path_N_W)
        if states.watch is not None:
            found = states.watch.stretches(self.slots, step, path_N_W)
            place = torch.from_numpy(np.concatenate([stretch.place for stretch in found]))
            hidden_X_E = self.policy.final(states.hidden_T_E[place])
            states.watch.keep(found, torch.cat([hidden_X_E, *(tap_T_E[place] for tap_T_E in states.taps)], -1))
