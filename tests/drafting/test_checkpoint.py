"""Heads as directories: what vLLM would read, and what is said about one that does not fit."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config.drafter import Eagle3Drafter
from asyncrl.drafting.checkpoint import fresh_head, head_tensors, load_head, save_head
from asyncrl.errors import CheckpointError, ConfigError, StorageError
from asyncrl.models.config import ModelConfig
from tests.support.draft_windows import DRAFTERS, KINDS, TARGET, random_head
from tests.support.full_disk import file_size_limit
from tests.support.tiny_model import LLAMA3_ROPE, SHAPE, tiny_config, tiny_eagle3


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_comes_back(kind: str, tmp_path: Path) -> None:
    head = random_head(kind, seed=4)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, TARGET)
    assert loaded.config == head.config
    for (name, one), (other, two) in zip(head_tensors(head), head_tensors(loaded), strict=True):
        assert name == other
        assert torch.equal(one, two), name
    assert load_head(tmp_path, TARGET, torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_names_are_views_into_the_head() -> None:
    head = random_head("eagle")
    for _, tensor in head_tensors(head):
        tensor.fill_(7.0)
    assert all(bool((parameter == 7.0).all()) for parameter in head.parameters())


def test_a_head_in_vllms_layout_is_read(tmp_path: Path) -> None:
    """As tests/engines gives it to vLLM itself."""
    tensors = tiny_eagle3(tmp_path)
    target = ModelConfig.from_hf(tiny_config("qwen3").to_dict())
    assert {name: tensor.shape for name, tensor in head_tensors(load_head(tmp_path, target))} == {
        name: tensor.shape for name, tensor in tensors.items()
    }


def test_a_reduced_vocabulary_is_saved_as_offsets_and_a_mask(tmp_path: Path) -> None:
    counts_V = torch.arange(48).flip(0)
    head = fresh_head(Eagle3Drafter(draft_vocabulary=5), TARGET, 0, counts_V.roll(2))
    save_head(head, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert head.drafts_U is not None
    assert head.drafts_U.tolist() == [2, 3, 4, 5, 6]
    assert saved["d2t"].tolist() == [2, 2, 2, 2, 2]
    assert saved["t2d"].nonzero().squeeze(1).tolist() == [2, 3, 4, 5, 6]
    assert saved["lm_head.weight"].shape == (5, 32)
    loaded = load_head(tmp_path, TARGET).drafts_U
    assert loaded is not None
    assert loaded.tolist() == [2, 3, 4, 5, 6]


def test_positions_and_rope_are_the_targets_and_biases_are_not(tmp_path: Path) -> None:
    raw = SHAPE | {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}
    for layers, taps in ((2, [0, 1]), (12, [2, 6, 9])):
        target = ModelConfig.from_hf(raw | {"num_hidden_layers": layers, "max_position_embeddings": 4321})
        save_head(fresh_head(Eagle3Drafter(), target, 0), tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["max_position_embeddings"] == 4321
        assert config["rope_parameters"] == LLAMA3_ROPE
        assert (config["attention_bias"], config["mlp_bias"]) == (False, False)
        assert (config["num_hidden_layers"], config["draft_vocab_size"]) == (1, 48)
        assert config["eagle_aux_hidden_state_layer_ids"] == taps
        assert config["num_aux_hidden_states"] == len(taps)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json.*asyncrl drafter train RUN"):
        load_head(tmp_path, TARGET)
    save_head(random_head("eagle3"), tmp_path)
    with pytest.raises(CheckpointError, match="hidden_size=32, but the target has 64; the head is another model's"):
        load_head(tmp_path, msgspec.structs.replace(TARGET, hidden_size=64))
    with pytest.raises(CheckpointError, match=r"layer_ids=\[0, 1\] must lie below the target's 1"):
        load_head(tmp_path, msgspec.structs.replace(TARGET, layers=1))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing fc\.weight, unexpected nothing; save the head again"):
        load_head(tmp_path, TARGET)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_head(tmp_path, TARGET)


def test_a_reduced_vocabulary_needs_counts_and_room() -> None:
    with pytest.raises(ConfigError, match="draft_vocabulary=99 is more than the model's vocabulary of 48"):
        fresh_head(Eagle3Drafter(draft_vocabulary=99), TARGET, 0)
    with pytest.raises(ConfigError, match="draft_vocabulary=5 of 48 tokens needs to know which are frequent"):
        fresh_head(Eagle3Drafter(draft_vocabulary=5), TARGET, 0)
    assert fresh_head(DRAFTERS["eagle3"], TARGET, 0).drafts_U is None


def test_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    with file_size_limit(100), pytest.raises(StorageError, match="make room and try again"):
        save_head(random_head("eagle"), tmp_path / "head")
