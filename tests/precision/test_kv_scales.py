"""Scales of an FP8 KV cache: numbers by hand, and what a trainer in bf16 finds against one in fp32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.precision.kv_scales import LayerScales, measure, scales_of, settled
from tests.support.tiny_model import tiny_checkpoint

SAMPLES = [np.random.default_rng(seed).integers(0, 24, 40 + 7 * seed).tolist() for seed in range(12)]


def test_scales_are_the_percentile_with_its_margin_over_the_largest_code() -> None:
    tokens_T = torch.arange(1001.0)  # of 1,001 numbers the 99.9th percentile is the last but one
    largest_L_X_T = torch.stack([torch.stack([tokens_T, tokens_T.flip(0) * 2, torch.zeros(1001)])])
    assert scales_of(largest_L_X_T) == (pytest.approx((999 * 1.05 / 448, 1998 * 1.05 / 448, 1.0)),)


def test_queries_that_were_not_looked_at_have_a_scale_of_one() -> None:
    largest_L_2_T = torch.tensor([[[448.0, 448.0], [896.0, 896.0]]])
    assert scales_of(largest_L_2_T) == (pytest.approx((1.0, 1.05, 2.1)),)


SCALES = st.floats(1e-6, 1e6)
LAYERS = st.lists(st.tuples(SCALES, SCALES, SCALES), min_size=1, max_size=3)


@given(LAYERS, st.data())
def test_scales_in_use_stay_while_they_fit(needed: list[LayerScales], data: st.DataObject) -> None:
    used = data.draw(st.lists(st.tuples(SCALES, SCALES, SCALES), min_size=len(needed), max_size=len(needed)))
    found = settled(used, needed)
    for old, new, scale in zip(np.ravel(used), np.ravel(needed), np.ravel(found), strict=True):
        fits = new <= old <= 4 * new
        assert scale == old if fits else new <= scale < 2 * new
        assert fits or np.frexp(scale)[0] == 0.5, "a power of two"
    assert settled(found, needed) == found


def test_settled_scales_by_hand() -> None:
    assert settled([(1.0, 1.0, 1.0)], [(0.3, 0.2, 1.01)]) == ((1.0, 0.25, 2.0),)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 0.0])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(WeightSyncError, match=rf"a scale of {scale} for .* training has diverged"):
        settled([(1.0, 1.0, 1.0)], [(1.0, scale, 1.0)])


def test_samples_do_not_see_each_other(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    model, _ = load_model(tmp_path, torch.float32)
    found, as_one = measure(model, SAMPLES), measure(model, [[token for sample in SAMPLES for token in sample]])
    np.testing.assert_allclose(measure(model, SAMPLES[::-1]), found, rtol=1e-5)
    assert not np.allclose(as_one, found, rtol=1e-3), "their order could not be told even if they did"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, on CPUs without bf16
def test_a_trainer_in_bf16_finds_what_one_in_fp32_does(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    wide, _ = load_model(tmp_path, torch.float32)
    found = measure(load_model(tmp_path, torch.bfloat16)[0], SAMPLES, narrow=True)
    np.testing.assert_allclose(found, measure(wide, SAMPLES), rtol=0.02)
