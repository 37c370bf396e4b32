"""Our AdamW: masters in two halves, moments in 8 bits, state in the host's memory."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from asyncrl.training import adamw
from asyncrl.training.adamw import BLOCK, AdamW, EightBit, join, split

BETAS = (0.9, 0.99)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_two_halves_are_the_number_and_the_first_is_the_nearest(numbers: list[float]) -> None:
    largest = torch.finfo(torch.bfloat16).max
    master = torch.tensor(numbers, dtype=torch.float32).clamp(-largest, largest)
    weight, half = split(master)
    assert (weight.dtype, half.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(weight, half).view(torch.int32), master.view(torch.int32))
    nearest = (master.bfloat16().float() - master).abs()
    assert torch.equal((weight.float() - master).abs(), nearest)


def test_halves_by_hand() -> None:
    """1 + 2^-8 lies between two bf16 numbers and goes up; 2^-20 below 1 is 16 units of the last place, 2^-24."""
    weight, half = split(torch.tensor([1.0, 1.0 + 2**-8, 1.0 - 2**-20]))
    assert weight.tolist() == [1.0, 1.0 + 2**-7, 1.0]
    assert half.tolist() == [0, -(1 << 15), -16]


def _parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((48, 256), (37,), (300, 256))]


def _gradients(step: int) -> list[Tensor]:
    """Numbers that bf16 has: the gradients of bf16 weights are rounded."""
    return [gradient.detach().float() for gradient in _parameters(torch.bfloat16, seed=100 + step)]


def _steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        for parameter, gradient in zip(parameters, _gradients(step), strict=True):
            (parameter.float() * gradient).sum().backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
        optimizer.step()


def _ours(parameters: list[nn.Parameter], **settings: bool) -> AdamW:
    return AdamW(parameters, betas=BETAS, weight_decay=0.1, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_masters_are_those_of_torch(dtype: torch.dtype, offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "PIECE", 4 * BLOCK)  # many pieces, the last one shorter
    weights = _parameters(dtype)
    expected = [nn.Parameter(weight.detach().float()) for weight in weights]
    theirs = torch.optim.AdamW(expected, betas=BETAS[:2], weight_decay=0.1)
    ours = _ours(weights, offload=offload)
    _steps(theirs, expected, range(5))
    _steps(ours, weights, range(5))
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours.master(weight), other.detach(), rtol=2e-6, atol=2e-7)
        if dtype == torch.bfloat16:
            assert not torch.equal(ours.master(weight), weight.float()), "a master has more digits"


def test_offloaded_state_gives_the_same_bits() -> None:
    found: list[list[Tensor]] = []
    for offload in (False, True):
        for eight_bit in (False, True):
            weights = _parameters(torch.bfloat16)
            optimizer = _ours(weights, offload=offload, eight_bit=eight_bit)
            _steps(optimizer, weights, range(3))
            found.append([optimizer.master(weight) for weight in weights])
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(found[one], found[other], strict=True))


def test_gradients_of_bf16_weights_add_up_in_fp32() -> None:
    (weight, *_) = weights = _parameters(torch.bfloat16)
    optimizer = _ours(weights)
    for factor in (1.0, 2**-10):
        (weight * torch.tensor(factor, dtype=torch.bfloat16)).sum().backward()
    found = optimizer.gradient(weight)
    assert found is not None
    assert weight.grad is None
    assert torch.equal(found, torch.full(weight.shape, 1.0 + 2**-10))
    optimizer.zero_grad()
    assert optimizer.gradient(weight) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_averaged_and_shortened_together(dtype: torch.dtype) -> None:
    """Sums of 6 and 8 in one number each: 3 and 4 on average, a norm of 5, of which 1 may stay."""
    one, other, unused = weights = [nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(3)]
    optimizer = AdamW(weights, betas=BETAS, weight_decay=0.0)
    (one[0] * 6 + other[1] * 8).backward()
    assert float(optimizer.average_gradients(2.0, 1.0)) == pytest.approx(5.0)
    found = [optimizer.gradient(weight) for weight in weights]
    expected = [[0.6, 0, 0, 0], [0, 0.8, 0, 0], [0, 0, 0, 0]]
    for gradient, numbers in zip(found, expected, strict=True):
        assert gradient is not None
        assert gradient.tolist() == pytest.approx(numbers, rel=1e-5)
    assert unused.grad is None or dtype == torch.float32


# Moments in 8 bits.


def _kept(first: Tensor, second: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    kept = EightBit.empty(first.numel(), lambda numel, dtype: torch.zeros(numel, dtype=dtype))
    EightBit.write(kept, first, second, torch.tensor(seed))
    return EightBit.read(kept)


@given(st.integers(0, 2**31 - 1), st.floats(1e-12, 1e6))
def test_a_moment_in_8_bits_is_near_and_keeps_its_sign(seed: int, size: float) -> None:
    """A step of the root is a 127th, that of the number at most 2 x 127ths of the geometric mean with the largest."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(4 * BLOCK, generator=generator) * size
    second = torch.rand(4 * BLOCK, generator=generator) * size**2
    one, two = _kept(first, second, seed % 1000)
    most1 = first.view(-1, BLOCK).abs().amax(1, keepdim=True)
    near = 2 / 127 * (first.view(-1, BLOCK).abs() * most1).sqrt() + most1 / 127**2
    assert bool(((one - first).view(-1, BLOCK).abs() <= near * 1.001).all())
    assert bool((one * first >= 0).all())
    assert bool((two > 0).all()), "it divides"
    most2 = second.view(-1, BLOCK).amax(1, keepdim=True)
    assert bool(((two.view(-1, BLOCK) / most2) ** 0.25 - (second.view(-1, BLOCK) / most2) ** 0.25 <= 1.001 / 255).all())


def test_rounding_is_right_on_average() -> None:
    """1,000 roundings of numbers that lie between two steps."""
    first, second = torch.full((BLOCK,), -0.3), torch.full((BLOCK,), 1e-4)
    first[0], second[0] = 1.0, 1.0
    found = torch.stack([torch.stack(_kept(first, second, seed))[:, 1:] for seed in range(1000)])
    assert found[:, 0].mean() == pytest.approx(-0.3, rel=1e-3)
    assert found[:, 1].mean() == pytest.approx(1e-4, rel=1e-3)
    assert found[:, 0].unique().numel() == found[:, 1].unique().numel() == 2


def test_a_moment_decays_where_rounding_to_the_nearest_would_hold_it() -> None:
    first, second = torch.full((BLOCK,), 0.01), torch.full((BLOCK,), 1e-4)
    first[0], second[0] = 1.0, 1.0
    for step in range(300):
        first, second = _kept(first, second * torch.where(torch.arange(BLOCK) > 0, 0.99, 1.0), step)
    assert second[1:].mean() == pytest.approx(1e-4 * 0.99**300, rel=0.1)


def test_zeros_stay_zeros() -> None:
    one, two = _kept(torch.zeros(BLOCK), torch.zeros(BLOCK))
    assert not one.any()
    assert not two.any()


def test_eight_bits_follow_fp32() -> None:
    """On a quadratic both come to the same place."""
    target = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 256))).float()
    distances: list[float] = []
    for eight_bit in (False, True):
        weight = nn.Parameter(torch.zeros(64, 256))
        optimizer = AdamW([weight], betas=BETAS, weight_decay=0.0, eight_bit=eight_bit)
        optimizer.param_groups[0]["lr"] = 0.05
        for _ in range(200):
            weight.grad = weight.detach() - target
            optimizer.step()
        distances.append(float((weight.detach() - target).norm() / target.norm()))
    assert max(distances) < 0.02


def test_few_numbers_stay_in_fp32() -> None:
    matrix, norm, odd = (nn.Parameter(torch.ones(shape)) for shape in ((64, 256), (512,), (8193,)))
    optimizer = AdamW([matrix, norm, odd], betas=BETAS, weight_decay=0.0, eight_bit=True)
    assert [optimizer.moments_of(p) is EightBit for p in (matrix, norm, odd)] == [True, False, False]


def test_an_optimizer_that_is_not_needed_any_more_frees_its_weights() -> None:
    weight = nn.Parameter(torch.ones(64, 4, dtype=torch.bfloat16))
    optimizer = AdamW([weight], betas=BETAS, weight_decay=0.0)
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = weakref.ref(weight)
    del weight, optimizer
    gc.collect()
    assert seen() is None
