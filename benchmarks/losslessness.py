"""Is speculative decoding exact? Sampled tokens against the policy's own distribution, greedy ones against plain ones.

    OMP_NUM_THREADS=1 python -m benchmarks.losslessness [--tokens 200000] [--greedy 1000]

**Statistic.** Every token has a context of its own, so tokens cannot simply be counted. But where a token x is drawn
from p, the number F(x) - r p(x), with F the sum of p up to x in any order of the vocabulary and r uniform, is itself
uniform, independently of all tokens before. It is computed from a plain forward over the finished answers, with the
tokens in falling order of p, and counted in 100 bins: the chi-square of these counts has 99 degrees of freedom,
whatever the contexts. A second one counts only tokens that were drafted for (all but the first of each answer), in the
order of the vocabulary. `wrong by 3 %` shows what the test sees: plain sampling at a temperature that is off by that.

The log-probabilities that the engine reports are compared with those of the same forward. Random policy of 32 tokens,
heads trained for a moment on its answers, so that they are right now and then.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.config.drafter import (
    Adaptive,
    DrafterSettings,
    DrafterTraining,
    Eagle3Drafter,
    EagleDrafter,
    HeadDrafter,
    NgramDrafter,
    NoDrafter,
)
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.drafting.checkpoint import fresh_head, save_head
from asyncrl.drafting.learner import DrafterLearner
from asyncrl.drafting.reading import read_windows
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.engines.native.sampling import restrict
from asyncrl.models.checkpoint import random_model, save_model
from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.packed import packed_attention
from asyncrl.types import EngineStats, Request, Sampling, Segment, Slot, Trajectory

VOCABULARY, PROMPTS, MAX_TOKENS, ROWS, BINS, UPDATES = 32, 64, 40, 128, 100, 400
FIXED = Adaptive(on=False)
KINDS = {
    "temperature 1": Sampling(max_tokens=MAX_TOKENS),
    "0.7, top-p 0.9": Sampling(max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.9),
}


class Answers(NamedTuple):
    requests: list[Request]
    segments: list[Segment]
    stats: EngineStats

    @property
    def acceptance(self) -> float:
        """Tokens of one answer's step that verifies a draft."""
        return 1 + sum(self.stats.accepted_by_position) / max(1, self.stats.drafts)


def policy() -> Decoder:
    """Weights of a size that makes tokens unevenly likely."""
    raw = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
    }
    return random_model(ModelConfig.from_hf(raw), seed=0)


def requests(count: int, sampling: Sampling, first: int = 0) -> list[Request]:
    """Groups of answers to the same prompts, as training has them, each with a seed of its own."""
    prompts = np.random.default_rng(0).integers(
        0, VOCABULARY, (max(PROMPTS, count if sampling.temperature == 0 else 0), 8)
    )
    return [
        Request(id=str(i), tokens=tuple(prompts[i % len(prompts)].tolist()), sampling=sampling, seed=first + i)
        for i in range(count)
    ]


async def answers(path: Path, drafter: DrafterSettings, asked: list[Request]) -> Answers:
    engine = NativeEngine(path, Settings(max_batch=ROWS), drafter, name="bench")
    await engine.start()

    async def one(request: Request) -> Segment:
        (delta,) = [delta async for delta in engine.submit(request)]
        return delta.segment

    segments = await asyncio.gather(*map(one, asked))
    stats = engine.stats()
    await engine.close()
    return Answers(asked, list(segments), stats)


def trained(drafter: HeadDrafter, model: Decoder, texts: Answers, folder: Path) -> None:
    """Save a head that has seen a few answers."""
    learner = DrafterLearner(
        fresh_head(drafter, model.config, 0), model.embed_tokens.weight, model.output_matrix, DrafterTraining(lr=3e-3)
    )
    trajectories = [
        Trajectory(
            slot=Slot(index, 0),
            prompt="",
            segments=(Segment.given(request.tokens), segment),
            reward=0.0,
            finish="length",
            started=0.0,
            finished=0.0,
            engine="",
        )
        for index, (request, segment) in enumerate(zip(texts.requests, texts.segments, strict=True))
    ]
    windows = list(read_windows(model, learner.head.config, trajectories, longest=512))
    for update in range(UPDATES):
        learner.update([windows[(8 * update + i) % len(windows)] for i in range(8)])
    save_head(learner.head, folder)


class Read(NamedTuple):
    """A plain forward over some answers."""

    logits_L_V: torch.Tensor
    """At temperature, not restricted."""
    tokens_L: torch.Tensor
    reported_L: torch.Tensor
    first_L: torch.Tensor
    """The first token of each answer, for which there is no draft."""


@torch.no_grad()
def forwards(model: Decoder, given: Answers) -> Iterator[Read]:
    for begin in range(0, len(given.requests), ROWS):
        here = slice(begin, begin + ROWS)
        pairs = list(zip(given.requests[here], given.segments[here], strict=True))
        texts = [[*request.tokens, *segment.tokens.tolist()] for request, segment in pairs]
        tokens_T = torch.tensor([token for text in texts for token in text])
        positions_T = torch.cat([torch.arange(len(text)) for text in texts])
        hidden_T_E = model(tokens_T, positions_T, packed_attention([len(text) for text in texts]))
        ends = np.cumsum([len(text) for text in texts])
        places = [np.arange(end - len(one), end) for end, (_, one) in zip(ends, pairs, strict=True)]
        place_L = torch.from_numpy(np.concatenate(places))
        reported = np.concatenate([segment.logprobs for _, segment in pairs])
        logits_L_V = model.logits(hidden_T_E[place_L - 1]) / pairs[0][0].sampling.temperature
        first_L = torch.cat([torch.arange(len(place)) == 0 for place in places])
        yield Read(logits_L_V, tokens_T[place_L], torch.from_numpy(reported), first_L)


def restricted(logits_L_V: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p == 1:
        return logits_L_V.softmax(-1)
    count = logits_L_V.shape[0]
    return restrict(logits_L_V, torch.zeros(count, 1), torch.full((count, 1), top_p)).softmax(-1)


class Test(NamedTuple):
    tokens: int
    p_by_rank: float
    p_by_token: float
    logprob_error: float


def judged(model: Decoder, given: Answers) -> Test:
    rng, top_p = np.random.default_rng(1), given.requests[0].sampling.top_p
    by_rank: list[npt.NDArray[np.float64]] = []
    by_token: list[npt.NDArray[np.float64]] = []
    error = 0.0
    for read in forwards(model, given):
        p_L_V, token_L_1 = restricted(read.logits_L_V, top_p), read.tokens_L[:, None]
        own_L = p_L_V.gather(1, token_L_1)[:, 0]
        order_L_V = p_L_V.sort(dim=1, descending=True).indices
        rank_L_1 = (order_L_V == token_L_1).int().argmax(1, keepdim=True)
        part_L = torch.from_numpy(rng.random(len(own_L))) * own_L
        ranked_L_V = p_L_V.gather(1, order_L_V).double().cumsum(1)
        by_rank.append((ranked_L_V.gather(1, rank_L_1)[:, 0] - part_L).numpy())
        plain_L = p_L_V.double().cumsum(1).gather(1, token_L_1)[:, 0] - part_L
        by_token.append(plain_L[~read.first_L].numpy())
        error = max(error, logprob_error(read, top_p))
    return Test(sum(map(len, by_rank)), uniformity(by_rank), uniformity(by_token), error)


def logprob_error(read: Read, top_p: float) -> float:
    """The largest. Where rounding alone decides whether a token is within top-p, either set is right."""
    errors = [
        (restricted(read.logits_L_V, p).gather(1, read.tokens_L[:, None])[:, 0].log() - read.reported_L).abs()
        for p in ({1.0} if top_p == 1 else {top_p - 1e-6, top_p, top_p + 1e-6})
    ]
    return float(torch.stack(errors).min(0).values.max())


def uniformity(parts: list[npt.NDArray[np.float64]]) -> float:
    """p-value of equal counts in all bins."""
    values = np.concatenate(parts)
    counts = np.histogram(values, BINS, (0, 1))[0]
    expected = len(values) / BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((BINS - 1) / 2.0), torch.tensor(statistic / 2)))


async def compare(folder: Path, tokens: int, greedy: int) -> None:
    model, path = policy(), folder / "model"
    save_model(model, path)
    texts = await answers(path, NoDrafter(), requests(256, KINDS["temperature 1"], first=10**6))
    heads: dict[str, HeadDrafter] = {
        "EAGLE chain": EagleDrafter(path=str(folder / "eagle"), tokens=4, adaptive=FIXED),
        "EAGLE-3 chain": Eagle3Drafter(path=str(folder / "eagle3"), tokens=4, adaptive=FIXED),
        "EAGLE-3 tree": Eagle3Drafter(path=str(folder / "eagle3"), tokens=3, top_k=4, verify=12, adaptive=FIXED),
    }
    trained(heads["EAGLE chain"], model, texts, folder / "eagle")
    trained(heads["EAGLE-3 chain"], model, texts, folder / "eagle3")
    drafters: dict[str, DrafterSettings] = {
        "none": NoDrafter(),
        **heads,
        "n-gram": NgramDrafter(tokens=4, min_match=1, adaptive=FIXED),
    }
    columns = ("sampling", 15), ("drafter", 14), ("tokens", 8), ("a step", 7), ("p (rank)", 9), ("p (token)", 10)
    print(*(f"{name:>{width}}" for name, width in columns), f"{'log-prob error':>15}")
    for kind, sampling in KINDS.items():
        asked = requests(tokens // MAX_TOKENS, sampling)
        for name, drafter in drafters.items():
            given = await answers(path, drafter, asked)
            report(kind, name, given, judged(model, given))
        wrong = await answers(path, NoDrafter(), requests(len(asked), tilted(sampling)))
        as_if = Answers(asked, wrong.segments, wrong.stats)
        report(kind, "wrong by 3 %", as_if, judged(model, as_if))
    asked = requests(greedy, Sampling(max_tokens=MAX_TOKENS, temperature=0.0))
    plain = await answers(path, NoDrafter(), asked)
    for name, drafter in drafters.items():
        given = await answers(path, drafter, asked)
        pairs = zip(given.segments, plain.segments, strict=True)
        same = sum(one.token_bytes == other.token_bytes for one, other in pairs)
        print(
            f"{'greedy':>15} {name:>14} {same:>8} of {greedy} answers identical, {given.acceptance:.2f} tokens a step"
        )


def tilted(sampling: Sampling) -> Sampling:
    return Sampling(
        max_tokens=MAX_TOKENS, temperature=1.03 * sampling.temperature, top_p=1.0 if sampling.top_p == 1 else 0.895
    )


def report(kind: str, name: str, given: Answers, test: Test) -> None:
    print(f"{kind:>15} {name:>14} {test.tokens:>8} {given.acceptance:>7.2f}", end=" ")
    print(f"{test.p_by_rank:>9.3f} {test.p_by_token:>10.3f} {test.logprob_error:>15.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--greedy", type=int, default=1_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(Path(folder), arguments.tokens, arguments.greedy))


if __name__ == "__main__":
    main()
