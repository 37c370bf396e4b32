"""Hidden states for the drafter, taken out of the trainer's own forward: no extra one is made for them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.drafter import DrafterTraining
from asyncrl.drafting.hidden_capture import Budget
from asyncrl.drafting.reading import cut
from asyncrl.drafting.windows import SENT_DTYPE, Window
from asyncrl.models.policy import Taps
from asyncrl.training.batches import Answer, PackedBatch, Row
from asyncrl.types import GIVEN, Ints


class HiddenTap:
    """Collects windows until they are drained."""

    def __init__(self, settings: DrafterTraining, layers: tuple[int, ...], seed: int) -> None:
        self._settings, self._layers = settings, layers
        self._budget = Budget(settings.tokens_per_source, settings.window_tokens, seed)
        self._version = 0
        self._windows: list[Window] = []

    def taps(self) -> Taps:
        return Taps(self._layers)

    def begin_step(self, version: int) -> None:
        self._version = version
        self._budget.begin_step()

    def take(self, batch: PackedBatch, hidden_T_E: Tensor, tapped: Sequence[Tensor]) -> None:
        """The states of some answers, gathered and brought to the CPU all at once. Of an answer with several rows each
        gives what no row before it had."""
        own = [row[source.path.shared :] for row, source in zip(batch.rows, batch.sources, strict=True)]
        chosen = [index for index, row in enumerate(own) if len(row) and self._budget.chooses(len(row))]
        if not chosen:
            return
        rows = [own[index] for index in chosen]
        place = torch.from_numpy(np.concatenate(rows)).to(hidden_T_E.device)
        tokens = batch.tokens_T[place].cpu().numpy()
        states = [x.detach().index_select(0, place).to("cpu", SENT_DTYPE) for x in (hidden_T_E, *tapped)]
        end = 0
        for index, row in zip(chosen, rows, strict=True):
            here, end = slice(end, end + len(row)), end + len(row)
            hidden, *taps = (state[here] for state in states)
            source = batch.sources[index]
            self._windows.append(self._window(batch.answers[source.sample], source, tokens[here], hidden, taps))

    def _window(self, answer: Answer, source: Row, tokens: Ints, hidden_T_E: Tensor, taps: Sequence[Tensor]) -> Window:
        """What comes after the last token of a row was sampled: the row is there to predict it."""
        prompt, (places, shared) = source.prompt, source.path
        after = int(np.flatnonzero(answer.sampled)[answer.before(prompt) == places[-1]][0])
        versions = np.concatenate([np.full(prompt, GIVEN), np.where(answer.sampled, answer.versions, GIVEN)])
        return cut(
            slot=answer.slot,
            version=self._version,
            tokens=np.append(tokens, answer.tokens[after]),
            versions=np.append(versions[places[shared:]], versions[prompt + after]),
            hidden_T_E=hidden_T_E,
            taps=taps,
            longest=self._settings.window_tokens,
            dtype=SENT_DTYPE,
            before=shared,
            answer_length=answer.num_sampled,
        )

    def drain(self) -> list[Window]:
        windows, self._windows = self._windows, []
        return windows
