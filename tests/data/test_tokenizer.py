"""The tokenizer: what we write transformers reads, and both agree on every text."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncrl.config.task import ChainsTask
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer, save_character_tokenizer
from asyncrl.errors import CheckpointError
from asyncrl.tasks.chains import CHARACTERS, END, Chains


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_character_tokenizer(path, CHARACTERS, END, 256)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


def test_ids_are_one_per_character_behind_pad_and_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.size == 2 + 10 + 26 + 3
    assert tokenizer.encode("$09az+-=") == [1, 2, 11, 12, 37, 38, 39, 40]
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.decode([0, 12, 5, 1, 0]) == "a3$"  # padding is not text, the end is


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet=CHARACTERS + END))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_reads_the_same(directory: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(directory)
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (1, 0, tokenizer.size)
    for index in range(50):
        prompt = Chains(ChainsTask(), 0).prompt("train", index)
        ids = tokenizer.encode(prompt.text + prompt.answer)
        assert theirs(prompt.text + prompt.answer)["input_ids"] == ids
        assert theirs.decode(ids) == prompt.text + prompt.answer


def test_a_foreign_character_is_refused_not_dropped(tokenizer: Tokenizer) -> None:
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("a3!")


def test_truncation_saved_in_the_file_is_ignored(directory: Path, tmp_path: Path) -> None:
    raw = json.loads((directory / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert len(load_tokenizer(tmp_path).encode("a3b+2=")) == 6


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "$"}}, (1,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "$"}}}, (1,)),
        ({"tokenizer_config.json": {"eos_token": "$"}, "config.json": {"eos_token_id": 5}}, (5,)),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [7, 8]}}, (7, 8)),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": None}}, (5,)),
    ],
)
def test_who_names_the_end(directory: Path, tmp_path: Path, files: dict[str, object], expected: tuple[int]) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).eos_ids == expected


def test_missing_files_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match="names no end token; add eos_token_id"):
        load_tokenizer(tmp_path)
