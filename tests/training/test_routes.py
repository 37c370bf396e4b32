"""Routes replayed by the trainer: the engine's experts, in forward and backward, or an error that names the sample."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import Importance
from asyncrl.config.engine import FakeEngine
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.errors import RouteError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.packed import packed_attention
from asyncrl.models.routes import RouteShape
from asyncrl.training.batches import PackedBatch, block, pack
from asyncrl.training.learner import Learner
from asyncrl.training.routes import ObservedRoutes
from asyncrl.types import Group, Segment, Slot, Trajectory
from tests.support.driving import LONG, Answer, ask, collect_all, serving
from tests.support.routes import part_of, routes_of, shape_of
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import gradients_of, make_groups

SHAPE = RouteShape(layers=(0, 1), active=2, experts=8)


def sampled(path: Path, *, prompt: int = 12) -> list[Group]:
    """Two groups of four, by an engine that records its routes."""
    prompts = [LONG[20 * group : 20 * group + prompt] for group in range(2)]
    requests = [ask(f"{g}/{s}", prompts[g], seed=s, max_tokens=30 + s) for g in range(2) for s in range(4)]

    async def run() -> list[Answer]:
        async with serving(NativeEngine(path, Settings(max_batch=8), name="native", routes=True)) as engine:
            return await collect_all(engine, requests)

    trajectories = [
        Trajectory(
            slot=Slot(index // 4, index % 4),
            prompt="p",
            segments=(Segment.given(request.tokens), *answer.segments),
            reward=float(index % 2),
            finish="length",
            started=0.0,
            finished=1.0,
            engine="native",
        )
        for index, (request, answer) in enumerate(zip(requests, asyncio.run(run()), strict=True))
    ]
    return [Group(id=g, trajectories=tuple(trajectories[4 * g : 4 * g + 4])) for g in range(2)]


def learner(path: Path, *, replay: bool = True, recompute: bool = False) -> Learner:
    run = Run(
        rollout=Rollout(router_replay="auto" if replay else "off"),
        trainer=Trainer(checkpoint_activations=recompute),
        correction=Importance(reject=()),
    )
    return Learner(path, run)


def packed(groups: list[Group], shape: RouteShape | None) -> PackedBatch:
    (batch,) = pack([block(group, [1.0] * 4, shape) for group in groups], 10_000)
    return batch


def test_under_the_engines_weights_the_replayed_forward_has_the_bits_of_the_routers_own(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    groups, found = sampled(tmp_path), learner(tmp_path)
    replayed, own = packed(groups, SHAPE), packed(groups, None)
    assert replayed.routes_T_L_C is not None
    assert own.routes_T_L_C is None
    assert torch.equal(found.token_logprobs(replayed), found.token_logprobs(own))
    # Each token of the packed batch has the route that a forward of its sample alone chooses.
    model, _ = load_model(tmp_path)
    for row in replayed.rows:
        tokens = replayed.tokens_T[torch.from_numpy(row)].tolist()
        assert np.array_equal(replayed.routes_T_L_C[torch.from_numpy(row)].numpy(), routes_of(model, tokens))


def _twins(directory: Path, trainer: PreTrainedModel) -> None:
    """Experts 4 to 7 are as likely as 0 to 3 up to rounding, which differs between engine and trainer."""
    for name, who in (("engine", 1), ("trainer", 2)):
        noise = torch.Generator().manual_seed(who)
        with torch.no_grad():
            for parameter_name, parameter in trainer.named_parameters():
                if parameter_name.endswith("mlp.gate.weight"):
                    parameter[4:] = parameter[:4] + 1e-3 * torch.randn(4, 32, generator=noise)
        trainer.save_pretrained(directory / name)


def test_where_rounding_changes_routes_replay_keeps_the_log_probabilities(tmp_path: Path) -> None:
    twins = tiny_checkpoint(tmp_path / "both", "qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False)
    _twins(tmp_path, twins)
    groups = sampled(tmp_path / "engine")
    with_replay, without = (learner(tmp_path / "trainer", replay=replay) for replay in (True, False))
    for each in (with_replay, without):
        each.accumulate(groups)
    replayed, routed_anew = with_replay.step().figures, without.step().figures
    assert routed_anew["mismatch_abs"] > 5 * replayed["mismatch_abs"]
    assert "route_mismatch" not in routed_anew
    # By hand: the recorded experts against the best of a forward that replays them, where a sampled token is predicted.
    model, _ = load_model(tmp_path / "trainer")
    assert shape_of(model) == RouteShape(layers=(0, 1), active=1, experts=8)
    batch = packed(groups, shape_of(model))
    assert batch.routes_T_L_C is not None
    differing = 0
    for row in batch.rows:
        routes = batch.routes_T_L_C[torch.from_numpy(row)]
        scores: list[torch.Tensor] = []

        def route(layer: int, scores_T_X: torch.Tensor, own: torch.Tensor = routes, seen: list[torch.Tensor] = scores):
            seen.append(scores_T_X)
            return own[:, layer].long()

        with torch.no_grad():
            tokens = batch.tokens_T[torch.from_numpy(row)]
            model(tokens, torch.arange(len(row)), packed_attention([len(row)]), route=route)
        best = torch.stack([scores_T_X.argmax(1) for scores_T_X in scores], 1)
        differing += int((best != routes[:, :, 0])[11:].sum())  # the prompt has 12 tokens
    assert 0.2 < replayed["route_mismatch"] < 0.8
    assert replayed["route_mismatch"] == pytest.approx(differing / (2 * len(batch.target_L)))


def test_recomputed_activations_use_the_same_routes(tmp_path: Path) -> None:
    """Random routes, none of which the router would choose again in the backward."""
    tiny_checkpoint(tmp_path, "qwen3_moe")
    kept, again = learner(tmp_path), learner(tmp_path, recompute=True)
    for each in (kept, again):
        each.accumulate(make_groups(2))
    assert all(map(torch.equal, gradients_of(kept), gradients_of(again)))
    assert kept.step().figures["route_mismatch"] == again.step().figures["route_mismatch"] > 0.9


def test_a_route_differs_by_its_experts_not_by_their_order() -> None:
    """Of three tokens in two layers; the second layer is computed again and not counted again."""
    scores_T_X = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.3, 0.1, 0.4, 0.2]])
    routes_T_L_C = torch.tensor([[[0, 1], [1, 0]], [[3, 2], [0, 1]], [[1, 3], [2, 1]]], dtype=torch.uint8)
    predict_L = torch.tensor([0, 0, 1, 2])  # two samples begin after the first token
    replay = ObservedRoutes(RouteShape(layers=(1, 3), active=2, experts=4), part_of(predict_L, routes_T_L_C))
    assert replay(1, scores_T_X).tolist() == [[0, 1], [3, 2], [1, 3]]
    for _ in range(2):
        assert replay(3, scores_T_X).tolist() == [[1, 0], [0, 1], [2, 1]]
    found = replay.found
    assert found.rerouted_L is not None
    assert found.rerouted_L.tolist() == [0, 0, 0.5, 1]
    assert found.load_N_X.tolist() == [[2, 3, 1, 2], [3, 4, 1, 0]]


def test_a_layer_that_is_computed_again_chooses_the_same_where_scores_are_equal() -> None:
    """Rounding tells the first two experts apart, and tells them apart the other way the second time."""
    routes = ObservedRoutes(RouteShape(layers=(1, 3), active=1, experts=3), part_of(torch.arange(1)))
    for layer, first, chosen in ((1, 0.4 + 1e-6, 0), (3, 0.4 - 1e-6, 1)):
        assert routes(layer, torch.tensor([[first, 0.4, 0.2]])).tolist() == [[chosen]]
    for layer, chosen in ((3, 1), (1, 0)):
        first = 0.4 - 1e-6 if layer == 1 else 0.4 + 1e-6
        assert routes(layer, torch.tensor([[first, 0.4, 0.2]])).tolist() == [[chosen]]
    assert routes.found.load_N_X.tolist() == [[1, 0, 0], [0, 1, 0]]


def test_more_than_256_experts_take_two_bytes_each() -> None:
    shape = RouteShape(layers=(0,), active=2, experts=300)
    assert shape.token_bytes == 4
    routes = np.array([[[299, 3]], [[0, 256]]], np.uint16)
    assert np.array_equal(shape.read(routes.tobytes()), routes)
    replayed = ObservedRoutes(shape, part_of(torch.arange(2), torch.from_numpy(routes)))
    assert replayed(0, torch.rand(2, 300)).tolist() == [[299, 3], [0, 256]]


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (b"", r"group 1, sample 2 has 0 bytes of routes; its 2 tokens before the last need 4 each"),
        (bytes(4), r"group 1, sample 2 has 4 bytes of routes"),
        (bytes(12), r"group 1, sample 2 has 12 bytes of routes"),
        (bytes([0, 1, 2, 3, 4, 5, 6, 8]), r"group 1, sample 2 has a route to expert 8, and a layer has 8"),
    ],
    ids=["missing", "too few", "too many", "no such expert"],
)
def test_routes_that_are_not_those_of_the_tokens_name_the_sample(routes: bytes, said: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    (_, group) = make_groups(2)
    segments = (Segment.given([1, 2]), Segment.sampled([3], [-1.0], 0, routes))
    short = [
        msgspec.structs.replace(t, segments=(segments[0], Segment.sampled([3], [-1.0], 0, bytes(8))))
        for t in group.trajectories
    ]
    short[2] = msgspec.structs.replace(short[2], segments=segments)
    group = msgspec.structs.replace(group, trajectories=tuple(short))
    with pytest.raises(RouteError, match=f"{said}.*set rollout.router_replay=off"):
        learner(tmp_path).accumulate([group])
    learner(tmp_path, replay=False).accumulate([group])
    Learner(tmp_path, Run(engine=FakeEngine())).accumulate([group])  # auto: it returns no routes
