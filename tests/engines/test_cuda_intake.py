"""What an engine for GPUs keeps of publications: where their tensors belong, and none of their memory."""

from collections.abc import Callable, Sequence
from weakref import ref

import pytest
import torch
from torch import Tensor

from asyncrl.engines.native.cuda import weights
from asyncrl.engines.native.cuda.kernels.shapes import Move
from asyncrl.engines.native.cuda.kernels.torch_kernels import KERNELS
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.engines.native.cuda.updates import CopyUpdate
from asyncrl.engines.native.weight_loading import Receiver
from asyncrl.errors import WeightSyncError
from asyncrl.types import WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.manifest import layout
from asyncrl.weights.transports.mirror import sealed

SHAPES = {"embed": (40, 16), "norm": (16,), "up": (24, 16), "scale": ()}
WHO = Receiver("test", "version 0", "model")
CPU = torch.device("cpu")


def tensors(value: float, **other: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.full(shape, value) for name, shape in (SHAPES | other).items()}


class Places:
    """A trainer that writes its versions into two buffers, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flats: dict[int, Flat] = {}
        monkeypatch.setattr(weights, "published", self.find)
        monkeypatch.setattr(weights, "digest_published", lambda manifest: self.find(manifest).digest())

    def publish(self, version: int, named: dict[str, Tensor]) -> WeightManifest:
        specs, total = layout(named.items())
        flat = self.flats.setdefault(version % 2, Flat.empty(specs, total))
        for spec in specs:
            flat.put(spec, named[spec.name])
        return sealed(version, flat)

    def find(self, manifest: WeightManifest) -> Flat:
        return self.flats[manifest.version % 2]


def test_tensors_are_looked_up_once_for_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[int] = []

    def mover(moves: Sequence[Move]) -> Callable[[Flat], None]:
        looked_up.append(len(moves))
        return KERNELS.mover(moves)

    held, trainer = tensors(0.0), Places(monkeypatch)
    intake = weights.Intake(held, Timeline(CPU), KERNELS._replace(mover=mover))
    for version in range(1, 6):
        manifest = trainer.publish(version, tensors(float(version)))
        checked = intake.check(manifest, WHO)
        assert all((tensor != version).all() for tensor in held.values()), "nothing is touched"
        checked.update.load(["norm"])
        assert (held["norm"] == version).all()
        assert (held["up"] != version).all()
        checked.update.load()
        assert all((tensor == version).all() for tensor in held.values())
    assert looked_up == [0, len(SHAPES)], "of the first half, in which none are, and of the second"


def test_memory_that_nobody_else_holds_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    held, trainer = tensors(0.0), Places(monkeypatch)
    intake = weights.Intake(held, Timeline(CPU), KERNELS)
    for version in (1, 3):
        intake.check(trainer.publish(version, tensors(float(version))), WHO).update.load()
        assert (held["up"] == version).all()
        memory = ref(trainer.flats.pop(1))
        assert memory() is None


@pytest.mark.parametrize("other", [{"norm": (17,)}, {"more": (3,)}])
def test_what_does_not_fit_is_refused_after_what_did(
    other: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, trainer = tensors(0.0), Places(monkeypatch)
    intake = weights.Intake(held, Timeline(CPU), KERNELS)
    intake.check(trainer.publish(1, tensors(1.0)), WHO).update.load()
    with pytest.raises(WeightSyncError, match="belongs to another model"):
        intake.check(trainer.publish(2, tensors(2.0, **other)), WHO)
    assert (held["norm"] == 1).all()


def test_a_wrong_digest_is_seen_though_the_place_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Places(monkeypatch)
    intake = weights.Intake(tensors(0.0), Timeline(CPU), KERNELS)
    intake.check(trainer.publish(1, tensors(1.0)), WHO)
    manifest = trainer.publish(3, tensors(3.0))
    trainer.find(manifest).memory[5] += 1
    with pytest.raises(WeightSyncError, match="version 0 is kept"):
        intake.check(manifest, WHO)


def test_tensors_of_all_kinds_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into another type of number, and into a part of a matrix, too."""
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES | {"odd": (3, 7), "flat": (8,)}
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    given |= {"bytes": given["up"].to(torch.float8_e4m3fn), "few": given["odd"].to(torch.float8_e4m3fn)}
    given |= {"ids": torch.arange(9)}
    trainer = Places(monkeypatch)
    manifest = trainer.publish(1, given)
    for dtype in (torch.float32, torch.bfloat16):
        types = {name: dtype if tensor.dtype == torch.float32 else tensor.dtype for name, tensor in given.items()}
        held = {name: torch.zeros(given[name].shape).to(types[name]) for name in given}
        held["up"] = torch.zeros(50, 16, dtype=dtype)[1:25]
        held["odd"] = torch.zeros(9, 7, dtype=dtype)[1:4]
        held["flat"] = torch.zeros(8, 2, dtype=dtype)[:, 1]
        weights.Intake(held, Timeline(CPU), KERNELS).check(manifest, WHO).update.load()
        for name, tensor in held.items():
            assert torch.equal(tensor.float(), given[name].to(types[name]).float()), name


def test_what_is_elsewhere_is_brought_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    held, trainer = tensors(0.0), Places(monkeypatch)
    trainer.publish(2, tensors(2.0))
    update = CopyUpdate(trainer.flats[0], held, None)
    update.load(["up", "norm"])
    assert [name for name, tensor in held.items() if (tensor == 2).all()] == ["norm", "up"]
    update.load()
    assert all((tensor == 2).all() for tensor in held.values())
