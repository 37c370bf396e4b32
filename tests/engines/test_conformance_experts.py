"""What every engine promises, of a mixture of experts: the same tests, with another model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from asyncrl.models.checkpoint import load_model, save_model
from asyncrl.training.checkpoint import OPTIMIZER
from tests.engines import test_conformance as dense
from tests.engines.test_conformance import (  # noqa: F401  (fixtures and tests are found by their names)
    path,
    shared_vllm,
    test_a_wrong_digest_leaves_the_old_weights,
    test_answers_are_fixed_by_their_seed_not_by_their_company,
    test_each_update_opens_a_segment,
    test_greedy_answers_equal_transformers,
    test_mixed_settings_report_the_distribution_sampled_from,
    test_updates_use_new_weights_on_old_or_new_keys,
)
from tests.support.driving import Driver
from tests.support.real_vllm import needs_vllm
from tests.support.tiny_model import tiny_checkpoint

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def family() -> str:
    return "qwen3_moe"


@pytest.fixture(scope="module")
def reference(path: Path, family: str) -> PreTrainedModel:  # noqa: F811
    """Engines load it from a training checkpoint, which has other tensors beside the weights."""
    theirs = tiny_checkpoint(path, family, tie_word_embeddings=True)
    ours, _ = load_model(path)
    save_model(ours, path)
    save_file({"norm/exp_avg": torch.zeros(32)}, path / OPTIMIZER)
    return theirs


VLLM = pytest.param("vllm", marks=[needs_vllm, pytest.mark.slow])
PAGED = pytest.param("paged", marks=pytest.mark.slow)


@pytest.fixture(params=["native", PAGED, pytest.param("cuda", marks=dense.ON_GPU), dense.TRANSFORMERS, VLLM])
def drive(request: pytest.FixtureRequest, path: Path, reference: PreTrainedModel) -> Driver:  # noqa: F811
    return dense.driver_for(request, path)


with_model = drive
