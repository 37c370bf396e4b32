"""A teacher: log-probabilities of tokens that another model has sampled.

It is computed with what training computes with, packed batches and `PolicyForward`: a teacher is a policy that is not
trained. So its distribution is cut and scaled as the rollouts' is, by temperature, top-k and top-p, and a teacher with
the student's own weights gives just the student's log-probabilities. Routes are its own: an engine records the
student's.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from asyncrl.config import Run
from asyncrl.config.distillation import Teacher
from asyncrl.models.checkpoint import load_policy
from asyncrl.training.batches import block, pack
from asyncrl.training.device import training_device
from asyncrl.training.forward import PolicyForward
from asyncrl.types import Floats, Group, Slot, Trajectory


class TeacherModel:
    """One frozen model. Calls come one after the other."""

    def __init__(self, settings: Teacher, run: Run) -> None:
        narrow = settings.dtype == "bf16"
        dtype = torch.bfloat16 if narrow else torch.float32
        self._device = training_device(settings.device)
        self._token_budget = run.trainer.token_budget
        self._model = load_policy(settings.directory, settings.backend, dtype).to(self._device).requires_grad_(False)
        if self._model.packing != "shared":
            self._model.packing = "padded" if self._model.try_out(narrow=narrow) else "packed"
        trainer = msgspec.structs.replace(run.trainer, dtype=settings.dtype)
        self._policy = PolicyForward(self._model, msgspec.structs.replace(run, trainer=trainer))

    @torch.no_grad()
    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
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
        found = [np.zeros(0, np.float32) for _ in trajectories]  # of one in which nothing was sampled
        for batch in pack([each for each in blocks if each.answers], self._token_budget, self._model.packing):
            logp_L = self._policy(batch.to(self._device)).logp_L.float().cpu()
            for answer, own_L in zip(batch.answers, logp_L.split(batch.lengths), strict=True):
                found[answer.slot.sample] = own_L.numpy()
        return found
