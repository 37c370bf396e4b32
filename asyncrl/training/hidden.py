"""Hidden states for the drafter, taken out of the trainer's own forward: no extra one is made for them.

A step has more tokens than the drafter may get, so each answer is taken with the same chance, which follows from the
size of the step before. First come, first served would take short answers, which are complete first.
"""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.drafting.reading import cut
from asyncrl.drafting.settings import DrafterTraining
from asyncrl.drafting.windows import Window
from asyncrl.models.decoder import Taps
from asyncrl.training.packing import PackedBatch
from asyncrl.types import GIVEN


class HiddenTap:
    """Collects windows until they are drained."""

    def __init__(self, settings: DrafterTraining, layers: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
        self._settings, self._layers, self._dtype = settings, layers, dtype
        self._random = random.Random(seed)
        self._version = self._seen = 0
        self._left = settings.tokens_per_step
        self._chance = 1.0
        self._windows: list[Window] = []

    def taps(self) -> Taps:
        return Taps(self._layers)

    def begin_step(self, version: int) -> None:
        if self._seen:
            self._chance = min(1.0, self._settings.tokens_per_step / self._seen)
        self._version, self._seen, self._left = version, 0, self._settings.tokens_per_step

    def take(self, batch: PackedBatch, hidden_T_E: Tensor, tapped: Sequence[Tensor]) -> None:
        for row, answer in zip(batch.rows, batch.answers, strict=True):
            self._seen += len(row)
            if self._left <= 0 or self._random.random() >= self._chance:
                continue
            self._left -= min(len(row), self._settings.window_tokens)
            place = torch.from_numpy(row).to(hidden_T_E.device)
            given = len(row) + 1 - len(answer.tokens)
            self._windows.append(
                cut(
                    slot=answer.slot,
                    version=self._version,
                    tokens=np.concatenate([batch.tokens_T[place[:given]].cpu().numpy(), answer.tokens]),
                    versions=np.concatenate([np.full(given, GIVEN), np.where(answer.sampled, answer.versions, GIVEN)]),
                    hidden_T_E=hidden_T_E.detach()[place],
                    taps=[tap.detach()[place] for tap in tapped],
                    longest=self._settings.window_tokens,
                    dtype=self._dtype,
                )
            )

    def drain(self) -> list[Window]:
        windows, self._windows = self._windows, []
        return windows
