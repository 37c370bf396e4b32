"""New weights in two halves: the first layers' beside a step that has passed them, the others' behind it."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.cuda.graphs import GraphPool
from asyncrl.engines.native.cuda.model import CudaModel
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.system.devices import has_gpu
from tests.support import needs
from tests.support.driving import ask, collect, publishing, serving
from tests.support.tiny_model import tiny_checkpoint

LAYERS = 3
SLEEP = 400_000_000
"""Cycles, a fifth of a second on a GPU: longer than anything else here."""


def test_every_step_says_when_it_is_behind_the_first_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes in then is just their weights, all before the others'."""
    tiny_checkpoint(tmp_path, num_hidden_layers=LAYERS)
    passed: list[int] = []
    norms: list[int] = []
    halves: list[tuple[set[str], set[str]]] = []
    engine = CudaEngine(tmp_path, Settings(max_batch=4, max_length=512), name="halves", device=torch.device("cpu"))
    attention = CudaModel.normed_for

    def seen(model: CudaModel, matrix: Tensor, x_T_E: Tensor, norm_E: Tensor) -> object:
        norms.extend(index for index, each in enumerate(model.input_norms) if each is norm_E)
        return attention(model, matrix, x_T_E, norm_E)

    @contextmanager
    def beside(_: Timeline) -> Generator[None]:
        before = {name: tensor.clone() for name, tensor in engine._intake.held.items()}
        yield
        held = engine._intake.held
        changed = {name for name, tensor in held.items() if not torch.equal(tensor, before[name])}
        halves.append((changed, held.keys() - changed))

    monkeypatch.setattr(CudaModel, "normed_for", seen)
    monkeypatch.setattr(Timeline, "pass_middle", lambda _: passed.append(len(norms)))
    monkeypatch.setattr(Timeline, "behind_middle", beside)
    other = tmp_path / "other"
    reference = tiny_checkpoint(other, seed=1, num_hidden_layers=LAYERS)

    async def run() -> None:
        with publishing(other) as publish:
            async with serving(engine):
                await collect(engine, ask("a", max_tokens=5))
                await engine.load_weights(publish(1), "keep")
                for name, tensor in engine._intake.held.items():
                    assert torch.equal(tensor, reference.state_dict()[name]), name

    asyncio.run(run())
    assert norms == list(range(LAYERS)) * len(passed)
    assert passed == [LAYERS * step + LAYERS // 2 for step in range(len(passed))]
    early, late = halves[0]
    assert {name.split(".")[2] for name in early} == {"0"}
    assert not any(name.startswith("model.layers.0.") for name in late if "norm" not in name)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason=needs.GPU)
def test_a_captured_step_reads_its_first_layers_before_they_change_and_goes_on_meanwhile() -> None:
    device = torch.device("cuda")
    timeline = Timeline(device)
    first, second, sum_1, sum_2 = (torch.zeros(1 << 20, device=device) for _ in range(4))
    new = torch.ones(1 << 20, device=device)

    def launch() -> None:
        torch.cuda._sleep(SLEEP)  # so that new weights that do not wait come before the first layers are read
        sum_1.add_(first)
        timeline.pass_middle()
        torch.cuda._sleep(SLEEP)
        sum_2.add_(second)

    graphs = GraphPool(timeline, 1 << 30)
    with timeline.work():
        graphs.run("step", launch)
        graphs.run("step", launch)  # from the graph
        early, late = torch.cuda.Event(), torch.cuda.Event()
        with timeline.behind_middle():
            first.copy_(new)
            early.record()
        second.copy_(new)
        late.record()
        early.synchronize()
        assert not late.query(), "the step is still asleep"
        late.synchronize()
    assert (sum_1.sum(), sum_2.sum(), first.sum(), second.sum()) == (0, 0, 1 << 20, 1 << 20)
    with timeline.work():
        graphs.run("step", launch)
    timeline.wait()
    assert (sum_1.sum(), sum_2.sum()) == (1 << 20, 1 << 20)
