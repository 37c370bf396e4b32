"""What settings of the weight plane are refused, and what the refusal says."""

from typing import Any

import pytest

from asyncrl.config.engine import FakeEngine, VllmEngine
from asyncrl.config.run import Run, Trainer, Weights, load
from asyncrl.errors import ConfigError
from asyncrl.weights import probe
from pipelines.plan import plan


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"weights": {"delta": True}}, "with weights.transport=auto engines read the trainer's own memory"),
        ({"weights": {"transport": "nccl"}, "trainer": {"device": "cpu"}}, "is for trainer and engine on GPUs"),
        (
            {"weights": {"transport": "cuda_ipc"}, "engine": {"type": "native", "device": "cpu"}},
            "use weights.transport",
        ),
        (
            {"weights": {"transport": "nccl"}, "engine": {"type": "vllm", "tensor_parallel": 2}},
            "engine.tensor_parallel=2; use weights.transport=auto or file",
        ),
        ({"weights": {"transport": "pigeon"}}, "use one of auto, cuda_ipc, file, nccl, shared_memory"),
        ({"weights": {"deadline_s": 0}}, "weights.deadline_s=0: expected `float` > 0"),
    ],
)
def test_refusals_name_the_way_out(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(raw)
    assert said in str(caught.value)


def test_a_transport_that_this_machine_cannot_have_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(weights=Weights(transport="nccl"))
    monkeypatch.setattr(plan, "has_gpu", lambda: False)
    assert any("weights.transport=nccl needs a GPU" in found for found in plan.problems(run))
    monkeypatch.setattr(plan, "has_gpu", lambda: True)
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    assert any("needs cupy: pip install 'asyncrl[nccl]'" in found for found in plan.problems(run))


def test_the_probe_is_as_strict_as_the_precision_allows() -> None:
    assert probe.tolerance(Run()) == 1e-3
    assert probe.tolerance(Run(trainer=Trainer(dtype="bf16"))) == 0.1
    assert probe.tolerance(Run(engine=VllmEngine(quantization="fp8"))) == 0.3
    assert probe.wanted(Run())
    assert not probe.wanted(Run(engine=FakeEngine()))
    assert not probe.wanted(Run(weights=Weights(probe=False)))


def test_the_probe_is_the_mean_difference() -> None:
    fixed = probe.Probe(((1,), (2,)), (-1.0, -2.0), 0.1)
    assert probe.gap(fixed, [-1.5, -2.0]) == 0.25
    assert probe.gap(fixed, [-1.5]) == float("inf")
    assert probe.gap(fixed, [-1.0, float("nan")]) == float("inf")
    assert all(request.ahead for request in probe.requests(fixed, 3))
    prompts = probe.prompts(151_936)
    assert prompts == probe.prompts(151_936)
    assert all(0 <= token < 20 for row in probe.prompts(20) for token in row)
