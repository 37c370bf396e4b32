"""Native engines with each kind of drafter, and random heads that agree with a target now and then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from asyncrl.config.drafter import Adaptive, DrafterSettings, Eagle3Drafter, EagleDrafter, NgramDrafter, Strategy
from asyncrl.config.engine import NativeEngine as NativeSettings
from asyncrl.drafting.checkpoint import save_head
from asyncrl.drafting.heads import Head, HeadConfig, Kind, default_taps
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.speculation.source import Chooser
from asyncrl.models.config import read_config
from asyncrl.models.decoder import Decoder
from asyncrl.models.layers import computed_rotation
from asyncrl.models.packed import packed_attention
from asyncrl.models.policy import Taps
from asyncrl.types import SpeculationArm

FIXED = Adaptive(on=False)
DRAFTERS = ("ngram", "eagle", "eagle3", "tree")
GUESSING = ("ngram", "tree")
"""Those that give the tokens of plain decoding at any temperature."""


def random_head(kind: Kind, target: Path, *, seed: int = 0, vocabulary: int = 0) -> Head:
    """Weights of a size that makes drafts unevenly likely; a reduced vocabulary is every n-th token."""
    config = read_config(target)
    taps = default_taps(config.layers) if kind == "eagle3" else ()
    size = vocabulary or config.vocabulary
    head = Head(HeadConfig(kind=kind, target=config, taps=taps, vocabulary=size))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm") else 0.2 * noise)
    if vocabulary:
        head.drafts_U = torch.arange(config.vocabulary)[:: config.vocabulary // vocabulary][:vocabulary].clone()
    return head


def features(head: Head, model: Decoder, text: list[int]) -> torch.Tensor:
    """What the head reads of a text, by a plain forward of the target."""
    taps = Taps(head.config.taps)
    hidden_T_E = model(torch.tensor(text), torch.arange(len(text)), packed_attention([len(text)]), taps)
    return head.features(torch.cat(taps.found_T_E, -1) if taps.layers else hidden_T_E)


def states(head: Head, model: Decoder, feature_T_E: torch.Tensor, next_tokens: list[int]) -> torch.Tensor:
    """The head over pairs from position 0 on, without a cache."""
    count = len(next_tokens)
    rotate = computed_rotation(model.frequencies_D, torch.float32)(torch.arange(count))
    return head(feature_T_E, model.embed_tokens(torch.tensor(next_tokens)), rotate, packed_attention([count]))


def teach(head: Head, model: Decoder, texts: list[list[int]], steps: int = 40) -> None:
    """Make a head agree with its target on some texts, though not on all of them."""
    model.requires_grad_(False)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    ids_V = torch.full((model.config.vocabulary,), -100)
    known = torch.arange(model.config.vocabulary) if head.drafts_U is None else head.drafts_U
    ids_V[known] = torch.arange(len(known))
    for step in range(steps):
        text = texts[step % len(texts)]
        state_T_E = states(head, model, features(head, model, text)[:-2], text[1:-1])
        loss = F.cross_entropy(head.logits(state_T_E, model.output_matrix), ids_V[torch.tensor(text[2:])])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def drafter(kind: str, folder: Path) -> DrafterSettings:
    """A fixed strategy; heads are read from `folder`, where `save_heads` put them."""
    match kind:
        case "ngram":
            return NgramDrafter(tokens=4, min_match=1, adaptive=FIXED)
        case "eagle":
            return EagleDrafter(path=str(folder / "eagle"), tokens=3, adaptive=FIXED)
        case "eagle3":
            return Eagle3Drafter(path=str(folder / "eagle3"), tokens=4, adaptive=FIXED)
        case "tree":
            return Eagle3Drafter(path=str(folder / "eagle3"), tokens=3, top_k=3, verify=9, adaptive=FIXED)
        case _:
            raise AssertionError(kind)


def save_heads(target: Path, folder: Path) -> None:
    save_head(random_head("eagle", target), folder / "eagle")
    save_head(random_head("eagle3", target, vocabulary=24), folder / "eagle3")


def drafting(kind: str, folder: Path) -> Callable[..., NativeEngine]:
    def make(path: Path, **settings: Any) -> NativeEngine:
        return NativeEngine(path, NativeSettings(**settings), drafter(kind, folder), name="native")

    return make


def paged_drafting(kind: str, folder: Path, device: str = "cpu") -> Callable[..., CudaEngine]:
    """The engine for GPUs; on a CPU with its kernels in torch."""

    def make(path: Path, *, chooser: Chooser | None = None, pages: int | None = None, **settings: Any) -> CudaEngine:
        return CudaEngine(
            path,
            NativeSettings(**settings),
            drafter(kind, folder),
            name="paged",
            device=torch.device(device),
            chooser=chooser,
            pages=pages,
        )

    return make


class Switching:
    """A chooser that goes through strategies in turn, a few steps each."""

    def __init__(self, strategies: tuple[Strategy, ...], steps: int) -> None:
        self._strategies, self._each, self._asked = strategies, steps, 0
        self.recorded: list[tuple[int, Strategy, int, float]] = []

    def choose(self, batch: int) -> Strategy:
        self._asked += 1
        return self._strategies[self._asked // self._each % len(self._strategies)]

    def record(self, batch: int, strategy: Strategy, tokens: int, seconds: float) -> None:
        self.recorded.append((batch, strategy, tokens, seconds))

    def report(self) -> tuple[SpeculationArm, ...]:
        return ()
