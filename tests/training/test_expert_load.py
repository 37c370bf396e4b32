"""How busy experts are: figures of the routes that the trainer computed with, and the loss that evens them out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import Grpo, Importance
from asyncrl.errors import ConfigError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.execution import Execution
from asyncrl.models.packed import packed_attention
from asyncrl.models.routes import RouteShape
from asyncrl.training.batches import block, pack
from asyncrl.training.diagnostics import load_figures
from asyncrl.training.forward import predicting_states
from asyncrl.training.learner import Learner
from asyncrl.training.routes import ObservedRoutes
from pipelines.compose import compose
from pipelines.plan.plan import problems
from tests.support.routes import part_of, shape_of
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import gradients_of, make_groups

SHAPE = RouteShape(layers=(0, 1), active=2, experts=8)
LENGTHS = (5, 33, 1, 12)


def _learner(path: Path, *, aux: float = 0.0, replay: bool = True, algorithm: Any = None, **settings: Any) -> Learner:
    run = Run(
        rollout=Rollout(router_replay="auto" if replay else "off"),
        trainer=Trainer(grad_clip=1e9, **settings),
        algorithm=algorithm or Grpo(router_aux_loss=aux),
        correction=Importance(reject=()),
    )
    return Learner(path, run)


def test_figures_are_means_over_layers() -> None:
    found = load_figures(torch.tensor([[4, 4, 4, 4], [0, 12, 4, 0]]))
    assert found == {"expert_load_max": 2.0, "expert_idle": 0.25}


@pytest.mark.parametrize("settings", [{}, {"token_budget": 60}, {"checkpoint_activations": True}])
def test_a_step_has_the_load_of_the_routes_it_computed_with(settings: dict[str, Any], tmp_path: Path) -> None:
    """However it is cut into batches."""
    tiny_checkpoint(tmp_path, "qwen3_moe")
    learner, groups = _learner(tmp_path, **settings), make_groups(3)
    for group in groups:
        learner.accumulate([group])
    (batch,) = pack([block(group, [1.0] * 4, SHAPE) for group in groups], 10_000)
    assert batch.routes_T_L_C is not None
    routes_L_N_C = batch.routes_T_L_C[batch.predict_L]
    load_N_X = torch.stack([torch.bincount(routes_L_N_C[:, layer].flatten(), minlength=8) for layer in range(2)])
    figures = learner.step().figures
    assert figures["expert_load_max"] == pytest.approx(float((load_N_X.amax(1) / load_N_X.float().mean(1)).mean()))
    assert figures["expert_idle"] == 0
    assert "router_aux_loss" not in figures


def test_without_replay_it_is_the_load_that_the_router_chose(tmp_path: Path) -> None:
    """A router that knows one pair of experts only, whatever the token."""
    model = tiny_checkpoint(tmp_path, "qwen3_moe", num_experts_per_tok=1)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data[2:], parameter.data[0] = 0.0, -parameter.data[1]
    model.save_pretrained(tmp_path)
    learner = _learner(tmp_path, replay=False)
    learner.accumulate(make_groups(3))
    figures = learner.step().figures
    assert figures["expert_idle"] == 6 / 8
    assert 4 <= figures["expert_load_max"] <= 8


def test_dense_models_have_no_such_figures(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3")
    learner = _learner(tmp_path)
    learner.accumulate(make_groups(2))
    assert not [name for name in learner.step().figures if "expert" in name or "rout" in name]


@pytest.mark.parametrize("recomputed", [0, 3])
def test_the_loss_is_that_of_transformers_over_real_tokens(recomputed: int, tmp_path: Path) -> None:
    """They pad and mask what is packed here; the dense layer has no router."""
    theirs: Any = tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    model, _ = load_model(tmp_path)
    tokens_T = torch.randint(1, 48, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    shape = shape_of(model)
    assert shape is not None
    routes = ObservedRoutes(shape, part_of(torch.arange(len(tokens_T))), balanced=True)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    hidden_T_E = model(
        tokens_T, positions_T, packed_attention(LENGTHS), run=Execution(recomputed=recomputed).layer, route=routes
    )
    ours = routes.found.balance_loss
    assert ours is not None
    padded = torch.nn.utils.rnn.pad_sequence(list(tokens_T.split(LENGTHS)), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.int64) for n in LENGTHS], batch_first=True)
    output = theirs(padded, attention_mask=mask, output_router_logits=True)
    wanted: Any = load_balancing_loss_func(output.router_logits, 8, 2, mask)
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)
    (ours + 0 * hidden_T_E.sum()).backward()
    wanted.backward()
    for index in (0, 2):
        experts = model.blocks()[index].experts
        assert experts is not None
        found, expected = experts.router.grad, theirs.model.layers[index].mlp.gate.weight.grad
        assert found is not None
        assert expected.any()
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_it_is_added_to_the_loss_of_a_step_as_a_mean(aggregation: Any, tmp_path: Path) -> None:
    """Of one batch: the gradient of a step is that of its loss, and so is the part of this term."""
    tiny_checkpoint(tmp_path, "qwen3_moe")
    groups, coefficient = make_groups(3), 0.5
    plain, balanced = (
        _learner(tmp_path, algorithm=Grpo(aggregation=aggregation, router_aux_loss=aux)) for aux in (0.0, coefficient)
    )
    for learner in (plain, balanced):
        learner.accumulate(groups)
    (batch,) = pack([block(group, [1.0] * 4, SHAPE) for group in groups], 10_000)
    model, _ = load_model(tmp_path)
    routes = ObservedRoutes(SHAPE, batch.here, balanced=True)
    predicting_states(model, batch, Trainer(), route=routes)
    balance = routes.found.balance_loss
    assert balance is not None
    parts = len(batch.target_L) if aggregation == "token" else len(batch.answers)
    wanted = torch.autograd.grad(coefficient * parts * balance, list(model.parameters()), materialize_grads=True)
    for with_it, without, part in zip(gradients_of(balanced), gradients_of(plain), wanted, strict=True):
        torch.testing.assert_close(with_it - without, part, atol=1e-5 * float(without.abs().max()) + 1e-6, rtol=1e-4)
    loss, report, added = plain.step().loss, balanced.step(), balance.item()
    assert report.figures["router_aux_loss"] == pytest.approx(added, rel=1e-5)
    assert report.loss - loss == pytest.approx(coefficient * added, rel=1e-4)


def test_it_evens_out_the_load(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    learner = _learner(tmp_path, aux=1.0, replay=False, lr=1e-2)
    losses: list[float] = []
    for _ in range(12):
        learner.accumulate(make_groups(3))
        losses.append(learner.step().figures["router_aux_loss"])
    assert losses[-1] < losses[0] - 0.05
    assert min(losses) > 1.9, "2 where all experts are equally busy"


def test_where_it_makes_no_sense_it_is_refused() -> None:
    (said,) = problems(compose(["experiment=quickstart", "algorithm.router_aux_loss=0.01"]))
    assert said == (
        "algorithm.router_aux_loss=0.01 balances the load of experts, and the model has none: set "
        "algorithm.router_aux_loss=0"
    )
    assert not problems(compose(["experiment=quickstart", "model=moe", "algorithm.router_aux_loss=0.01"]))
    with pytest.raises(ConfigError, match=r"batch_normalize=true does not go with .*router_aux_loss"):
        compose(["experiment=quickstart", "algorithm.router_aux_loss=0.01", "correction.batch_normalize=true"])
