"""FP8's checks on a card: a captured pass over published weights sees what lies there now, and nothing waits twice."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.precision import Fp8, numerics
from asyncrl.engines.native.cuda.fp8 import Fp8Serving, serve
from asyncrl.engines.native.cuda.kernels.choice import kernels_of
from asyncrl.engines.native.cuda.updates import CopyUpdate
from asyncrl.engines.native.weight_loading import Receiver
from asyncrl.errors import DivergenceError, WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.decoder import Decoder
from asyncrl.models.names import hf_tensors
from asyncrl.precision.kv_scales import LayerScales
from asyncrl.precision.publication import Fp8Source
from asyncrl.types import Fp8Version, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import OneRank, fill
from tests.support import needs
from tests.support.gpu_waits import waits
from tests.support.tiny_model import tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU),
]
CUDA = torch.device("cuda")
WHO = Receiver("test", "version 0", "model")
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 3}


class Scene:
    """A trainer's weights, two places where it puts them, and an engine that serves none of them."""

    def __init__(self, path: Path) -> None:
        self.trained, config = load_model(path, torch.bfloat16, CUDA)
        served, _ = load_model(path, torch.bfloat16, CUDA)
        self.source = Fp8Source(OneRank(lambda: hf_tensors(self.trained)), config.layers, Fp8())
        with torch.inference_mode():
            _, _, serving = serve(served, Settings(max_length=256), kernels_of(CUDA), numerics("fp8_full", Fp8()))
        assert serving is not None
        self.serving: Fp8Serving = serving
        specs, total = self.source.layout()
        self.places = [Flat.empty(specs, total, CUDA) for _ in range(2)]

    def put(self, place: int) -> Flat:
        self.source.layout()
        return fill(self.source, self.places[place])

    def scales(self, flat: Flat, given: tuple[LayerScales, ...] = ()) -> list[tuple[float, float]]:
        manifest = WeightManifest(
            version=1, tensors=flat.specs, total_bytes=0, digest="", location="", fp8=Fp8Version((), given)
        )
        return [(scales[1], scales[2]) for scales in self.serving.kv_scales(manifest, self.update(flat), WHO)]

    def update(self, flat: Flat) -> CopyUpdate:
        return CopyUpdate(flat, self.serving._weights.held, None)


def grow(model: Decoder, factor: float) -> None:
    with torch.no_grad():
        for layer in model.blocks():
            layer.qkv_proj.weight.mul_(factor)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    tiny_checkpoint(tmp_path, **SHAPE)
    return Scene(tmp_path)


def test_a_replayed_pass_measures_the_weights_that_lie_there_now(scene: Scene) -> None:
    kept: list[Flat] = []
    for version in range(8):
        grow(scene.trained, 1.5 if version % 3 else 0.5)
        flat = scene.put(version % 2)
        found = scene.scales(flat)
        specs, total = scene.source.layout()
        kept.append(fill(scene.source, Flat.empty(specs, total, CUDA)))  # a place of its own: never replayed
        np.testing.assert_allclose(found, scene.scales(kept[-1]), rtol=1e-3)
    assert scene.serving._gauge is not None
    assert scene.serving._gauge._graphs.count == 2


def test_scales_of_weights_that_have_grown_are_refused_by_a_replayed_pass(scene: Scene) -> None:
    fitting = tuple((1.0, keys, values) for keys, values in scene.scales(scene.put(0)))
    for _ in range(2):
        scene.scales(scene.put(0), fitting)
    assert scene.serving._check is not None
    assert scene.serving._check._graphs.count == 1
    grow(scene.trained, 8.0)
    with pytest.raises(WeightSyncError, match=r"the scale of values in layer 0 is .*: stale scales"):
        scene.scales(scene.put(0), fitting)


def test_a_trainer_waits_once_for_all_that_it_quantizes(scene: Scene) -> None:
    scene.put(0)
    assert waits(lambda: scene.put(0)) <= 1
    scene.trained.blocks()[1].down_proj.weight.data[3, 3] = torch.inf
    with pytest.raises(DivergenceError, match=r"model\.layers\.1\.mlp\.down_proj\.weight has values that are infinite"):
        scene.put(1)


def test_requests_wait_once_for_the_probe(scene: Scene) -> None:
    flat = scene.put(0)
    manifest = WeightManifest(version=1, tensors=flat.specs, total_bytes=0, digest="", location="")
    expected = scene.serving.expected(manifest, scene.update(flat), WHO)
    held, specs = scene.serving._weights.held, {spec.name: spec for spec in flat.specs}

    def load(names: Iterable[str]) -> None:
        for name in names:
            held[name].copy_(flat.tensor(specs[name]))

    with torch.inference_mode():
        scene.serving.probe(expected, load)
        assert waits(lambda: scene.serving.probe(expected, load)) <= 1
        flat.tensor(specs["model.layers.1.mlp.down_proj.weight"]).zero_()
        with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.down_proj\.weight in FP8 is off by 100 %"):
            scene.serving.probe(expected, load)
