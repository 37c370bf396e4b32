"""What is drafted: lookups by hand, and heads against the same head run over whole texts without a cache."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config.drafter import Eagle3Drafter, EagleDrafter, NgramDrafter, NoDrafter, Strategy
from asyncrl.config.engine import FakeEngine as FakeSettings
from asyncrl.config.engine import NativeEngine as NativeSettings
from asyncrl.drafting.bandit import Range
from asyncrl.drafting.checkpoint import head_tensors, save_head
from asyncrl.drafting.heads import Head, Kind
from asyncrl.engines.fake import FakeEngine
from asyncrl.engines.native.build import build_native
from asyncrl.engines.native.cpu.draft_heads import Tree
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.engines.native.sampling import Purpose, draw, stream_starts, uniforms_at
from asyncrl.engines.native.speculation.ngram import Group
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.decoder import Decoder
from asyncrl.types import EngineStats, Request
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter
from tests.support.drafters import FIXED, Switching, features, random_head, states, teach
from tests.support.driving import LONG, PROMPT, Answer, ask, collect, collect_all, native, serving
from tests.support.parity import gathered, reference_logits
from tests.support.tiny_model import tiny_checkpoint

Drafting = Callable[[list[int]], list[list[int]]]
"""From a text to all drafted paths behind it, longest last."""


def test_lookup_by_hand() -> None:
    group, one, other = Group([], 2, 3), list[int](), list[int]()
    group.extend(one, [1, 2, 3, 4, 5, 1, 2])
    assert group.draft(one, 2) == [3, 4]
    assert group.draft(one, 9) == [3, 4, 5, 1, 2, 3, 4, 5, 1], "where the text ends, the lookup goes on"
    group.extend(other, [7, 2, 3])
    assert group.draft(other, 3) == [4, 5, 1], "from the other text"
    group.extend(other, [8, 2, 3])
    assert group.draft(other, 2) == [8, 2], "the newest occurrence"
    group.extend(one, [3])
    assert group.draft(one, 1) == [4], "a longer run counts more than a newer one"
    assert group.draft([9, 9], 3) == []


def test_the_prompt_is_known_to_all_answers_and_does_not_hide_newer_ones() -> None:
    group = Group([1, 2, 3, 1, 2], 2, 3)
    first = group.text()
    assert group.draft(first, 2) == [3, 1]
    group.extend(first, [7])
    second = group.text()
    assert second == [1, 2, 3, 1, 2]
    assert group.draft(second, 1) == [7], "what the first answer went on with"


def test_a_tree_by_hand() -> None:
    """Two children each of four tokens, three levels; scores are products of probabilities."""
    tree = Tree(2)
    tokens, parents = tree.grow(torch.tensor([[[0.1, 0.6, 0.3, 0.0]]]).log())
    assert (tokens.tolist(), parents.tolist()) == ([[1, 2]], [[0, 0]])
    # Behind token 1: 0.6 * (0.5, 0.4); behind token 2: 0.3 * (0.9, 0.1).
    tokens, parents = tree.grow(torch.tensor([[[0.5, 0.4, 0.05, 0.05], [0.0, 0.0, 0.1, 0.9]]]).log())
    assert (tokens.tolist(), parents.tolist()) == ([[0, 3]], [[0, 1]])
    # 0.30 * (0.7, 0.3) and 0.27 * (0.5, 0.5).
    tree.grow(torch.tensor([[[0.0, 0.7, 0.3, 0.0], [0.5, 0.0, 0.0, 0.5]]]).log())
    columns = [list(zip(*(x[0].tolist() for x in tree.best(budget)), strict=True)) for budget in (3, 6)]
    assert columns[0] == [(1, 0, 1), (2, 0, 1), (0, 1, 2)]
    assert columns[1] == [(1, 0, 1), (2, 0, 1), (0, 1, 2), (1, 1, 2), (3, 2, 2), (1, 3, 3)]


class Offline:
    """The head over a whole text, with hidden states from a plain forward."""

    def __init__(self, head: Head, model: Decoder) -> None:
        self._head, self._model = head, model

    def logp(self, text: list[int], drafted: list[int]) -> Tensor:
        """Of the token behind what was drafted behind a text."""
        feature_T_E = features(self._head, self._model, text)[:-1]
        for more in range(len(drafted) + 1):
            state_T_E = states(self._head, self._model, feature_T_E, [*text[1:], *drafted[:more]])
            feature_T_E = torch.cat([feature_T_E, state_T_E[-1:]])
        logits = self._head.logits(state_T_E[-1:], self._model.output_matrix)[0]
        spread = torch.full((self._model.config.vocabulary,), -torch.inf)
        ids = torch.arange(len(spread)) if self._head.drafts_U is None else self._head.drafts_U
        return spread.index_copy(0, ids, logits.log_softmax(-1))

    def chain(self, depth: int, request: Request) -> Drafting:
        """Greedy, or drawn with the request's own numbers: a drawn token is accepted or does not come at all."""
        start = stream_starts(request.seed)[Purpose.DRAFT]

        def draft(text: list[int]) -> list[list[int]]:
            path = list[int]()
            for index in range(depth):
                logp_V = self.logp(text, path)
                uniform = uniforms_at(start, np.array([[len(text) + index - len(request.tokens)]]))
                drawn = draw(logp_V.exp()[None], torch.from_numpy(uniform))
                path.append(int(drawn if request.sampling.temperature else logp_V.argmax()))
            return [path[: length + 1] for length in range(depth)]

        return draft

    def tree(self, strategy: Strategy) -> Drafting:
        def draft(text: list[int]) -> list[list[int]]:
            frontier: list[tuple[float, list[int]]] = [(0.0, [])]
            found: list[tuple[float, list[int]]] = []
            for _ in range(strategy.depth):
                level: list[tuple[float, list[int]]] = []
                for score, path in frontier:
                    logp, tokens = self.logp(text, path).topk(strategy.top_k)
                    level += [(score + x, [*path, t]) for x, t in zip(logp.tolist(), tokens.tolist(), strict=True)]
                found += level
                frontier = sorted(level, reverse=True)[: strategy.top_k]
            return [path for _, path in sorted(sorted(found, reverse=True)[: strategy.nodes], key=lambda x: len(x[1]))]

        return draft


def expected_acceptance(draft: Drafting, text: list[int], begin: int, end: int, depth: int) -> list[int]:
    """Accepted by position, if the greedy text from `begin` on is drafted and verified window by window."""
    accepted = [0] * depth
    at = begin + 1  # the first token comes without a draft
    while at < end:
        rest = text[at:end]
        hits = [path for path in draft(text[:at]) if path == rest[: len(path)]]
        for position in range(max(map(len, hits), default=0)):
            accepted[position] += 1
        at += max(map(len, hits), default=0) + 1
    return accepted


CASES: list[tuple[Kind, int, Strategy]] = [
    ("eagle", 0, Strategy(depth=3)),
    ("eagle3", 0, Strategy(depth=3)),
    ("eagle3", 16, Strategy(depth=2)),
    ("eagle", 0, Strategy(depth=3, top_k=4, verify=14)),
    ("eagle3", 24, Strategy(depth=3, top_k=4, verify=14)),
]


@pytest.mark.parametrize(("kind", "vocabulary", "strategy"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_draft_what_they_say_of_the_whole_text(
    kind: Kind, vocabulary: int, strategy: Strategy, temperature: float, tmp_path: Path
) -> None:
    """Acceptance tells drafts apart: with the wrong feature, embedding, position or key, other tokens would fit."""
    tiny_checkpoint(tmp_path / "model")
    model, _ = load_model(tmp_path / "model")
    head = random_head(kind, tmp_path / "model", vocabulary=vocabulary)
    settings = (EagleDrafter if kind == "eagle" else Eagle3Drafter)(
        path=str(tmp_path / "head"),
        tokens=strategy.depth,
        top_k=strategy.top_k,
        verify=strategy.verify,
        adaptive=FIXED,
    )
    prompts = [LONG[:3], LONG[20:61], LONG[:3]]
    requests = [ask(str(i), p, seed=i, temperature=temperature, max_tokens=16) for i, p in enumerate(prompts)]

    async def run(engine: NativeEngine) -> tuple[list[Answer], EngineStats]:
        async with serving(engine):
            return await collect_all(engine, requests), engine.stats()

    plain, _ = asyncio.run(run(native(tmp_path / "model")))
    teach(head, model, [[*request.tokens, *one.tokens.tolist()] for request, one in zip(requests, plain, strict=True)])
    save_head(head, tmp_path / "head")
    engine = NativeEngine(tmp_path / "model", NativeSettings(prefill_chunk=8), settings, name="native")
    answers, stats = asyncio.run(run(engine))
    with torch.no_grad():
        offline = Offline(head, model)
        expected = np.zeros(strategy.depth, np.int64)
        for request, answer in zip(requests, answers, strict=True):
            draft = offline.tree(strategy) if strategy.is_tree else offline.chain(strategy.depth, request)
            text = [*request.tokens, *answer.tokens.tolist()]
            expected += expected_acceptance(draft, text, len(request.tokens), len(text), strategy.depth)
    accepted = [*stats.accepted_by_position, *[0] * (strategy.depth - len(stats.accepted_by_position))]
    assert sum(accepted) > 3, "a case without accepted drafts says nothing"
    assert accepted == expected.tolist()
    assert stats.drafted_tokens == stats.drafts * strategy.nodes
    assert stats.generated_tokens == 48


def test_switching_strategies_in_mid_answer_changes_nothing(tmp_path: Path) -> None:
    """Plain, chains and trees in turn: greedy answers stay, and drafting goes on without what it has not followed."""
    reference = tiny_checkpoint(tmp_path / "model")
    save_head(random_head("eagle3", tmp_path / "model"), tmp_path / "head")
    tree = Strategy(depth=2, top_k=3, verify=5)
    drafter = Eagle3Drafter(path=str(tmp_path / "head"), tokens=2, top_k=3, verify=5, adaptive=FIXED)
    requests = [ask(str(i), LONG[: 2 + i], temperature=0.0, max_tokens=20 + 2 * i) for i in range(20)]

    async def plain() -> list[Answer]:
        async with serving(native(tmp_path / "model", max_batch=6)) as engine:
            return await collect_all(engine, requests)

    async def switching(chooser: Switching) -> tuple[list[Answer], EngineStats]:
        settings = NativeSettings(max_batch=6, prefill_chunk=7)
        engine = NativeEngine(tmp_path / "model", settings, drafter, name="native", chooser=chooser)
        async with serving(engine):
            return await collect_all(engine, requests), engine.stats()

    expected = asyncio.run(plain())
    chooser = Switching((Strategy(depth=0), Strategy(depth=1), tree, Strategy(depth=2)), steps=3)
    answers, stats = asyncio.run(switching(chooser))
    for request, answer, one in zip(requests, answers, expected, strict=True):
        assert answer.tokens.tolist() == one.tokens.tolist()
        logits = reference_logits(reference, request, answer)
        np.testing.assert_allclose(answer.logprobs, gathered(logits, answer.tokens), atol=1e-4)
    assert {strategy.nodes for _, strategy, _, _ in chooser.recorded} == {0, 1, 2, 5}
    assert all(1 <= batch <= 6 and tokens >= 0 and seconds > 0 for batch, _, tokens, seconds in chooser.recorded)
    assert stats.drafts > 30


def test_a_stop_token_or_the_limit_ends_an_accepted_run(tmp_path: Path) -> None:
    """An answer that repeats itself is drafted by lookup; each length and each stop must cut it exactly."""
    tiny_checkpoint(tmp_path)
    drafter = NgramDrafter(tokens=5, min_match=1, adaptive=FIXED)

    async def run() -> None:
        engine = NativeEngine(tmp_path, NativeSettings(), drafter, name="native")
        async with serving(engine), serving(native(tmp_path)) as plain:
            free = await collect(plain, ask("free", temperature=0.0, max_tokens=60))
            tokens = free.tokens.tolist()
            lengths = [ask(f"l{n}", temperature=0.0, max_tokens=n) for n in range(1, 40)]
            stops = [ask(f"s{t}", temperature=0.0, max_tokens=60, stop=(t,)) for t in sorted(set(tokens))]
            for request, answer in zip(lengths, await collect_all(engine, lengths), strict=True):
                assert (answer.finish, answer.tokens.tolist()) == ("length", tokens[: request.sampling.max_tokens])
            for request, answer in zip(stops, await collect_all(engine, stops), strict=True):
                cut = tokens.index(request.sampling.stop[0]) + 1
                assert (answer.finish, answer.tokens.tolist()) == ("stop", tokens[:cut])
            assert sum(engine.stats().accepted_by_position) > 100
            assert engine.stats().generated_tokens == sum(range(1, 40)) + sum(
                tokens.index(request.sampling.stop[0]) + 1 for request in stops
            )

    asyncio.run(run())


def test_drafts_reach_to_the_very_end_of_the_cache(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    save_head(random_head("eagle", tmp_path), tmp_path / "head")
    drafter = EagleDrafter(path=str(tmp_path / "head"), tokens=3, top_k=4, verify=12, adaptive=FIXED)

    async def run() -> None:
        async with serving(NativeEngine(tmp_path, NativeSettings(max_length=40), drafter, name="native")) as engine:
            answers = await collect_all(engine, [ask(str(i), LONG[:20], max_tokens=100, seed=i) for i in range(8)])
        async with serving(native(tmp_path, max_length=40)) as plain:
            expected = await collect_all(plain, [ask(str(i), LONG[:20], max_tokens=100, seed=i) for i in range(8)])
        for answer, one in zip(answers, expected, strict=True):
            assert (answer.finish, answer.tokens.tolist()) == ("length", one.tokens.tolist())
            assert len(answer.tokens) == 20

    asyncio.run(run())


def spoil_file(file: Path) -> None:
    file.write_bytes(b"\1" + file.read_bytes()[1:])


def test_a_published_head_takes_over_and_a_spoiled_one_does_not(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    heads = [random_head("eagle3", tmp_path / "model", seed=seed, vocabulary=24) for seed in (0, 1)]
    heads[1].drafts_U = torch.arange(24, 48)
    for index, head in enumerate(heads):
        save_head(head, tmp_path / str(index))
    writer = SharedMemoryWriter(lambda: head_tensors(heads[1]), prefix="test")
    requests = [ask(str(i), LONG[: 5 + i], temperature=0.0, max_tokens=30) for i in range(8)]

    def engine(path: str) -> NativeEngine:
        drafter = Eagle3Drafter(path=path, tokens=3, adaptive=FIXED)
        return NativeEngine(tmp_path / "model", NativeSettings(), drafter, name="native")

    async def acceptance(path: str, *, update: bool = False, spoil: bool = False) -> tuple[int, ...]:
        async with serving(engine(path)) as running:
            manifest = writer.publish(4)
            if spoil:
                spoil_file(Path(manifest.location))
                with pytest.raises(WeightSyncError, match="drafter 0 is kept"):
                    await running.load_drafter(manifest)
            if update:
                ack = await running.load_drafter(manifest)
                assert (ack.version, ack.digest) == (4, manifest.digest)
            await collect_all(running, requests)
            assert running.stats().version == 0, "the policy's version stays"
            return running.stats().accepted_by_position

    try:
        old, new = asyncio.run(acceptance(str(tmp_path / "0"))), asyncio.run(acceptance(str(tmp_path / "1")))
        assert old != new
        assert asyncio.run(acceptance(str(tmp_path / "0"), update=True)) == new
        assert asyncio.run(acceptance(str(tmp_path / "0"), spoil=True)) == old
    finally:
        writer.close()


def test_engines_without_a_head_refuse_one(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    head = random_head("eagle", tmp_path)
    writer = SharedMemoryWriter(lambda: head_tensors(head), prefix="test")

    async def run() -> None:
        manifest = writer.publish(1)
        for drafter in (NoDrafter(), NgramDrafter()):
            async with serving(NativeEngine(tmp_path, NativeSettings(), drafter, name="native")) as engine:
                with pytest.raises(EngineError, match="no drafting head, as drafter="):
                    await engine.load_drafter(manifest)
        async with serving(FakeEngine(FakeSettings(), name="fake")) as engine:
            with pytest.raises(EngineError, match="no drafting head"):
                await engine.load_drafter(manifest)
        third = Eagle3Drafter(adaptive=FIXED)
        async with serving(NativeEngine(tmp_path, NativeSettings(), third, name="native")) as engine:
            with pytest.raises(WeightSyncError, match=r"another drafting head, differing in layers\.0\.mlp"):
                await engine.load_drafter(manifest)

    try:
        asyncio.run(run())
    finally:
        writer.close()


def test_the_bandit_chooses_and_reports_and_the_next_one_goes_on(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    drafter = NgramDrafter(min_match=1)

    async def run() -> tuple[EngineStats, list[Range]]:
        async with serving(build_native(tmp_path, NativeSettings(), drafter, name="native")) as engine:
            await collect(engine, ask("a", PROMPT, temperature=0.0, max_tokens=300))
            return engine.stats(), engine.learned()

    stats, learned = asyncio.run(run())
    saved = msgspec.json.decode(msgspec.json.encode(learned), type=list[Range])
    after = build_native(tmp_path, NativeSettings(), drafter, name="after", learned=saved)
    assert after.stats().speculation == stats.speculation
    assert after.learned() == learned
    assert {arm.depth for arm in stats.speculation} >= {0, 1}
    assert all(arm.batch == 1 and arm.tokens_per_second > 0 for arm in stats.speculation)
    assert stats.drafts < stats.steps, "plain decoding is measured too"
