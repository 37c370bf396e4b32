"""The quantizer against a reference that is written from the definition of E4M3, number by number."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from asyncrl.errors import DivergenceError
from asyncrl.precision.layers import is_quantized
from asyncrl.precision.quantizer import (
    ACTIVATION_BLOCK,
    WEIGHT_BLOCK,
    Quantized,
    blocked_product,
    dequantize,
    quantize,
    reference_product,
    rounded,
    saturated,
)

Floats = npt.NDArray[np.float32]


def _value(code: int) -> float:
    """E4M3: exponent bias 7, three bits of mantissa, no infinity; all ones are no number."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


GRID = np.array([_value(code) for code in range(127)])
"""Every number that is not negative, by its code."""

LARGEST = np.float32(3.2e38)
"""Beyond it the next number of E4M3 may be past fp32's range."""


def nearest(x: Floats) -> npt.NDArray[np.uint8]:
    """The code of the nearest number, the even one of two that are equally near; saturates."""
    size = np.abs(x.astype(np.float64))
    above = np.searchsorted(GRID, size).clip(1, 126)
    low, high = size - GRID[above - 1], GRID[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    code = np.where(size >= GRID[-1], 126, code)
    return (code | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def reference(x: Floats, block: tuple[int, int], power_of_two: bool) -> tuple[npt.NDArray[np.uint8], Floats, Floats]:
    """Codes, scales and what comes back, block by block."""
    rows, columns = -(-x.shape[0] // block[0]), -(-x.shape[1] // block[1])
    codes, scales, back = np.zeros(x.shape, np.uint8), np.ones((rows, columns), np.float32), np.zeros_like(x)
    for row in range(rows):
        for column in range(columns):
            place = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            scale = np.abs(x[place]).max() / np.float32(448)
            scale = np.float32(1) if scale == 0 else scale
            if power_of_two:
                exponent = max(-149, int(np.log2(np.float64(scale))) - 2)
                while 2.0**exponent < scale:
                    exponent += 1
                scale = np.float32(2.0**exponent)
            scales[row, column] = scale
            codes[place] = nearest(x[place] / scale)
            numbers = GRID[codes[place] & 127].astype(np.float32) * np.where(codes[place] & 128, -1, 1)
            back[place] = numbers.astype(np.float32) * scale
    return codes, scales, back


def _assert_equal(x: Floats, block: tuple[int, int], power_of_two: bool) -> None:
    codes, scales, back = reference(x, block, power_of_two)
    found = quantize(torch.from_numpy(x), block, power_of_two=power_of_two)
    np.testing.assert_array_equal(found.values_N_C.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(found.scales_B_B.numpy().view(np.uint32), scales.view(np.uint32))
    np.testing.assert_array_equal(dequantize(found).numpy().view(np.uint32), back.view(np.uint32))
    if block == ACTIVATION_BLOCK:
        there_and_back = rounded(torch.from_numpy(x), power_of_two=power_of_two).numpy()
        np.testing.assert_array_equal(there_and_back.view(np.uint32), back.view(np.uint32))


def _adversarial() -> dict[str, Floats]:
    normal = np.random.default_rng(0).standard_normal
    tiny, huge = np.float32(1e-45), LARGEST
    one_large = normal((130, 260)).astype(np.float32)
    one_large[0, 0] = 1e30
    ties = (GRID[:-1] + GRID[1:]) / 2
    mixed = normal((200, 300)).astype(np.float32)
    mixed[:128, 128:256] = 0
    return {
        "zeros": np.zeros((256, 256), np.float32),
        "negative zeros": np.full((3, 130), -0.0, np.float32),
        "one number": np.array([[-3.0]], np.float32),
        "denormal": np.full((2, 129), tiny),
        "denormals": (normal((64, 128)) * 1e-42).astype(np.float32),
        "denormal scales": (normal((64, 128)) * 1e-37).astype(np.float32),
        "huge": np.where(normal((129, 128)) > 0, huge, -huge / 3).astype(np.float32),
        "one large among small": one_large,
        "a block of zeros": mixed,
        "not multiples": normal((131, 257)).astype(np.float32),
        "ties": np.concatenate([ties, -ties, [448.0]])[None].astype(np.float32)[:, -128:],
        "every E4M3 number": np.concatenate([GRID, [-448.0]])[None].astype(np.float32),
    }


@pytest.mark.parametrize("power_of_two", [False, True], ids=["amax", "power-of-two"])
@pytest.mark.parametrize("block", [WEIGHT_BLOCK, ACTIVATION_BLOCK], ids=["128x128", "1x128"])
@pytest.mark.parametrize("name", list(_adversarial()))
def test_bit_equal_to_the_definition(name: str, block: tuple[int, int], power_of_two: bool) -> None:
    _assert_equal(_adversarial()[name], block, power_of_two)


@settings(max_examples=40, deadline=None)
@given(
    x=arrays(
        np.float32,
        array_shapes(min_dims=2, max_dims=2, max_side=140),
        elements=st.floats(-float(LARGEST), float(LARGEST), width=32),
        fill=st.sampled_from([np.float32(0), np.float32(0.3)]),
    ),
    block=st.sampled_from([WEIGHT_BLOCK, ACTIVATION_BLOCK]),
    power_of_two=st.booleans(),
)
def test_bit_equal_for_any_floats(x: Floats, block: tuple[int, int], power_of_two: bool) -> None:
    _assert_equal(x, block, power_of_two)


def test_e4m3_numbers_come_back_as_they_are() -> None:
    x = torch.from_numpy(np.concatenate([GRID, -GRID[1:]])[None].astype(np.float32))[:, :128]
    x[0, 0] = 448.0
    assert torch.equal(dequantize(quantize(x, ACTIVATION_BLOCK)), x)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused_by_name(bad: float, power_of_two: bool) -> None:
    x = torch.ones(130, 130)
    x[129, 129] = bad
    said = r"model\.layers\.1\.mlp\.up_proj\.weight has values that are infinite or not a number, in 1 of its 4 blocks"
    with pytest.raises(DivergenceError, match=said):
        quantize(x, WEIGHT_BLOCK, name="model.layers.1.mlp.up_proj.weight", power_of_two=power_of_two)


def test_a_fixed_scale_cuts_off() -> None:
    x = torch.tensor([[0.0, 1.0, -4.48, 4.6, 100.0, -100.0]])
    assert torch.allclose(saturated(x, 0.01), torch.tensor([[0.0, 0.96, -4.48, 4.48, 4.48, -4.48]]), atol=0.05)
    assert saturated(x, 0.01).abs().max() == torch.tensor(448.0) * 0.01


def _gaussian(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(64, 512, 384), (7, 300, 130), (1, 1024, 256)])
def test_products_of_gaussian_data(shape: tuple[int, int, int], power_of_two: bool) -> None:
    tokens, inputs, outputs = shape
    x, weight = _gaussian(tokens, inputs, 0), _gaussian(outputs, inputs, 1) * 0.02
    quantized: tuple[Quantized, Quantized] = (
        quantize(x, ACTIVATION_BLOCK, power_of_two=power_of_two),
        quantize(weight, WEIGHT_BLOCK, power_of_two=power_of_two),
    )
    exact, product = x.double() @ weight.double().t(), reference_product(*quantized)
    assert float((product - exact).norm() / exact.norm()) <= 0.04
    assert torch.allclose(blocked_product(*quantized), product, rtol=1e-4, atol=1e-5)


def test_what_is_kept() -> None:
    projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    projections += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.experts.7.down_proj"]
    assert all(is_quantized(f"model.layers.3.{name}.weight", 8) for name in projections)
    kept = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    parts = ["input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.q_proj.bias", "mlp.gate.weight"]
    parts += ["block_sparse_moe.gate.weight", "mlp.shared_expert_gate.weight", "post_attention_layernorm.weight"]
    assert not any(is_quantized(name, 8) for name in [*kept, *(f"model.layers.3.{part}" for part in parts)])


def test_whole_layers_can_be_kept() -> None:
    found = [is_quantized(f"model.layers.{i}.mlp.up_proj.weight", 5, keep_first=1, keep_last=2) for i in range(5)]
    assert found == [False, True, True, False, False]
