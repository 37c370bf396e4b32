"""A teacher: log-probabilities of tokens that another model has sampled, and what it would have sampled itself.

It is computed with what training computes with, packed batches and `PolicyForward`: a teacher is a policy that is not
trained. So its distribution is cut and scaled as the rollouts' is, by temperature, top-k and top-p, and a teacher with
the student's own weights gives just the student's log-probabilities. Its likeliest tokens are those of the whole
distribution (`asyncrl.models.head`). Routes are its own: an engine records the student's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from asyncrl.config import Run
from asyncrl.config.distillation import Teacher
from asyncrl.models.checkpoint import load_policy
from asyncrl.training.batches import PackedBatch, block, pack
from asyncrl.training.device import training_device
from asyncrl.training.forward import PolicyForward
from asyncrl.types import Floats, Group, Ints, Slot, Trajectory


class Said(NamedTuple):
    """Of the sampled tokens of one trajectory."""

    logprobs: Floats
    top_k: Ints
    """As `Trajectory.teacher_top_k` has it."""

    @property
    def broken(self) -> int:
        """Tokens of which something is no finite number."""
        top = self.top_k[:, self.top_k.shape[1] // 2 :].view(np.float32)
        return int((~np.isfinite(self.logprobs) | ~np.isfinite(top).all(1)).sum())


class TeacherModel:
    """One frozen model. Calls come one after the other."""

    def __init__(self, settings: Teacher, run: Run, vocabulary: int | None = None) -> None:
        """`vocabulary`: of the student, which may have fewer tokens or more; None: as many."""
        narrow = settings.dtype == "bf16"
        dtype = torch.bfloat16 if narrow else torch.float32
        self._device = training_device(settings.device)
        self._token_budget = run.trainer.token_budget
        self._model = load_policy(settings.directory, settings.backend, dtype).to(self._device).requires_grad_(False)
        if self._model.packing != "shared":
            self._model.packing = "padded" if self._model.try_out(narrow=narrow) else "packed"
        trainer = msgspec.structs.replace(run.trainer, dtype=settings.dtype)
        self._policy = PolicyForward(self._model, msgspec.structs.replace(run, trainer=trainer))
        self._top_k, self._vocabulary = run.distill.top_k, vocabulary or self._model.config.vocabulary

    @torch.no_grad()
    def judge(self, trajectories: Sequence[Trajectory]) -> list[Said]:
        """Of the sampled tokens of each, in batches of `trainer.token_budget` tokens; those of a group have its prompt
        once."""
        for trajectory in trajectories:  # on a GPU it would end every later computation as well
            if (last := int(trajectory.tokens.max())) >= self._model.config.vocabulary:
                raise ValueError(f"token {last} is none of the {self._model.config.vocabulary} that the teacher knows")
        groups: dict[int, list[Trajectory]] = {}
        for number, trajectory in enumerate(trajectories):
            numbered = msgspec.structs.replace(trajectory, slot=Slot(trajectory.slot.group, number))
            groups.setdefault(trajectory.slot.group, []).append(numbered)
        blocks = [block(Group(id=id, trajectories=tuple(own)), [0.0] * len(own)) for id, own in groups.items()]
        silent = Said(np.zeros(0, np.float32), np.zeros((0, 0), np.int32))
        found = [silent for _ in trajectories]
        for batch in pack([each for each in blocks if each.answers], self._token_budget, self._model.packing):
            for answer, said in zip(batch.answers, self._judge(batch.to(self._device)), strict=True):
                found[answer.slot.sample] = said
        return found

    def _judge(self, batch: PackedBatch) -> list[Said]:
        if not self._top_k:
            logp_L = self._policy(batch).logp_L
            top_L_X = torch.empty(len(logp_L), 0, dtype=torch.int32)
        else:
            logp_L, ids_L_K, top_L_B = self._policy.top_logprobs(batch, self._top_k, self._vocabulary)
            top_L_X = torch.cat((ids_L_K.int(), top_L_B.float().view(torch.int32)), 1)
        both = zip(logp_L.float().cpu().split(batch.lengths), top_L_X.cpu().split(batch.lengths), strict=True)
        return [Said(own_L.numpy(), top.numpy()) for own_L, top in both]
