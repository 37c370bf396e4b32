"""Experts: values and gradients of transformers, chosen by scores or by a route that was recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.models.checkpoint import load_model, save_model
from asyncrl.models.config import ModelConfig
from asyncrl.models.execution import Execution
from asyncrl.models.experts import ExpertTensors
from asyncrl.models.names import hf_tensors
from asyncrl.models.packed import packed_attention
from pipelines.compose import compose
from pipelines.plan.plan import problems
from tests.support.tiny_model import tiny_checkpoint, tiny_config

LENGTHS = (5, 33, 1, 70, 12, 8)
VARIANTS: dict[str, dict[str, Any]] = {
    "all layers": {},
    "scores as they are": {"norm_topk_prob": False},
    "a dense layer": {"mlp_only_layers": [0]},
    "every second layer": {"decoder_sparse_step": 2},
    "all experts": {"num_experts_per_tok": 8},
    "one expert": {"num_experts_per_tok": 1},
}


def _tokens() -> tuple[Tensor, Tensor]:
    tokens_T = torch.randint(0, 48, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    return tokens_T, torch.cat([torch.arange(length) for length in LENGTHS])


class Recorded:
    """Chooses by the scores and takes down what was chosen."""

    def __init__(self, active: int) -> None:
        self._active = active
        self.by_layer: dict[int, Tensor] = {}

    def __call__(self, layer: int, scores_T_X: Tensor) -> Tensor:
        self.by_layer[layer] = scores_T_X.topk(self._active).indices
        return self.by_layer[layer]

    def again(self, layer: int, _: Tensor) -> Tensor:
        return self.by_layer[layer]


@pytest.mark.parametrize("recomputed", [0, 2])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_values_and_every_gradient_are_those_of_transformers(
    changes: dict[str, Any], recomputed: int, tmp_path: Path
) -> None:
    reference = tiny_checkpoint(tmp_path, "qwen3_moe", **changes)
    model, _ = load_model(tmp_path)
    tokens_T, positions_T = _tokens()
    run = Execution(recomputed=recomputed).layer
    ours = model.logits(model(tokens_T, positions_T, packed_attention(LENGTHS), run=run))
    theirs = torch.cat([reference(sample.unsqueeze(0)).logits[0] for sample in tokens_T.split(LENGTHS)])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    ours.logsumexp(-1).sum().backward()
    theirs.logsumexp(-1).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad  # so that gradients have names, too
    save_model(model, tmp_path / "gradients")
    for parameter in reference.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    reference.save_pretrained(tmp_path / "theirs")
    found, wanted = (load_file(tmp_path / who / "model.safetensors") for who in ("gradients", "theirs"))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("recomputed", [0, 2])
def test_a_replayed_choice_gives_the_same_bits(recomputed: int, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    model, config = load_model(tmp_path)
    assert config.experts is not None
    tokens_T, positions_T = _tokens()
    recorded = Recorded(config.experts.active)
    run = Execution(recomputed=recomputed).layer
    found: list[tuple[Tensor, list[Tensor]]] = []
    for route in (None, recorded, recorded.again):
        model.zero_grad()
        hidden_T_E = model(tokens_T, positions_T, packed_attention(LENGTHS), run=run, route=route)
        model.logits(hidden_T_E).logsumexp(-1).sum().backward()
        found.append((hidden_T_E.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    for hidden_T_E, gradients in found[1:]:
        assert torch.equal(hidden_T_E, found[0][0])
        assert all(map(torch.equal, gradients, found[0][1]))


def test_another_choice_changes_the_answer_and_the_router_learns_of_those_that_were_chosen(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe", norm_topk_prob=False)
    model, _ = load_model(tmp_path)
    tokens_T, positions_T = _tokens()

    def last_two(_: int, scores_T_X: Tensor) -> Tensor:
        return torch.tensor([[6, 7]]).expand(len(scores_T_X), 2)

    plain = model(tokens_T, positions_T, packed_attention(LENGTHS))
    routed = model(tokens_T, positions_T, packed_attention(LENGTHS), route=last_two)
    assert (plain - routed).abs().max() > 0.1
    model.logits(routed).logsumexp(-1).sum().backward()
    experts = model.blocks()[0].experts
    assert experts is not None
    gate_up, router = experts.gate_up.grad, experts.router.grad
    assert gate_up is not None
    assert router is not None
    assert not gate_up[: 6 * 2 * 32].any(), "nobody asked the first six"
    assert gate_up[6 * 2 * 32 :].any()
    assert router[6:].any()


def test_both_layouts_load_and_what_is_saved_loads_in_transformers(tmp_path: Path) -> None:
    reference = tiny_checkpoint(tmp_path / "theirs", "qwen3_moe")
    model, _ = load_model(tmp_path / "theirs")
    packed = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    assert any(tensor.dim() == 3 for tensor in packed.values()), "transformers holds all experts in one tensor"
    (tmp_path / "packed").mkdir()
    save_file(packed, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "packed" / "config.json").write_text((tmp_path / "theirs" / "config.json").read_text())
    other, _ = load_model(tmp_path / "packed")
    for (name, one), (_, two) in zip(hf_tensors(model), hf_tensors(other), strict=True):
        assert torch.equal(one, two), name
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in dict(hf_tensors(model))
    save_model(model, tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    for name, tensor in reference.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_more_active_experts_than_there_are_is_refused() -> None:
    raw = json.loads(tiny_config("qwen3_moe", num_experts_per_tok=9).to_json_string())
    with pytest.raises(CheckpointError, match="num_experts_per_tok=9 is more than num_experts=8"):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["engine=vllm", "rollout.precision=fp8"],
            "rollout.precision=fp8 engine.quantization=none: vLLM takes no updates of experts in FP8 yet; "
            "set rollout.precision=bf16 engine.quantization=none",
        ),
        (["engine=vllm", "engine.quantization=fp8"], "set rollout.precision=fp32 engine.quantization=none"),
        (
            ["rollout.max_tokens=4200000", "engine.max_length=4300000"],
            "the buffer stores 67.1 MB at most; set rollout.router_replay=off, or lower rollout.max_tokens",
        ),
    ],
)
def test_what_experts_cannot_do_is_refused_with_the_way_out(settings: list[str], said: str) -> None:
    assert any(said in problem for problem in problems(compose(["experiment=quickstart", "model=moe", *settings])))


@pytest.mark.parametrize("gpu", [True, False])
def test_vllm_on_a_cpu_has_experts_of_some_hidden_sizes_and_no_routes(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.plan.plan.has_gpu", lambda: gpu)

    def said(*settings: str) -> list[str]:
        run = compose(["experiment=quickstart", "model=moe", "engine=vllm", *settings])
        return [problem for problem in problems(run) if "experts" in problem]

    assert said() == said("model.expert_size=40") == said("model.hidden_size=80", "cluster=auto") == []
    wrong = said("model.hidden_size=80")
    assert len(wrong) == (0 if gpu else 1)
    assert gpu or "a multiple of 32, and the model has hidden_size=80; use engine=native" in wrong[0]
    refused = said("rollout.router_replay=on")
    assert len(refused) == (0 if gpu else 1)
    assert gpu or refused[0] == (
        "rollout.router_replay=on: engine=vllm does not return which experts it chose on a CPU; set "
        "rollout.router_replay=auto, or use engine=native"
    )


def test_replay_without_experts_is_refused_with_the_way_out() -> None:
    (said,) = problems(compose(["experiment=quickstart", "rollout.router_replay=on"]))
    assert said == (
        "rollout.router_replay=on replays which experts the engine chose, and the model has no experts: set "
        "rollout.router_replay=auto"
    )


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_adapters_on_experts_are_allowed(engine: str) -> None:
    run = compose(["experiment=quickstart", "model=moe", f"engine={engine}", "trainer.lora.rank=4"])
    assert not [problem for problem in problems(run) if "lora" in problem]


def test_inputs_of_an_experts_matrices_may_be_rounded() -> None:
    """As FP8 does; one expert, so that the sum is its answer alone."""
    x_T_E, router_E_X = torch.randn(5, 4), torch.zeros(4, 1)
    gate_up_X_E_F, down_X_F_E = torch.randn(1, 4, 6), torch.randn(1, 3, 4)
    experts = ExpertTensors(router_E_X, gate_up_X_E_F, down_X_F_E, active=1, renormalized=True)
    gate_T_F, up_T_F = (torch.round(x_T_E) @ gate_up_X_E_F[0]).chunk(2, dim=-1)
    wanted_T_E = torch.round(torch.nn.functional.silu(gate_T_F) * up_T_F) @ down_X_F_E[0]
    torch.testing.assert_close(experts.forward(x_T_E, 0, None, torch.round), wanted_T_E)


def test_more_active_experts_than_are_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"active_experts=3 must not be above experts=2"):
        compose(["experiment=quickstart", "model=moe", "model.experts=2", "model.active_experts=3"])
