"""The warm start: the same model for a seed, readable by transformers, taught by answers that are wrong on purpose."""

import math
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask, JsonlTask
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer, save_character_tokenizer
from asyncrl.errors import ConfigError, StorageError
from asyncrl.models.checkpoint import load_model, random_model
from asyncrl.models.packed import packed_attention
from asyncrl.tasks.chains import CHARACTERS, END, Chain, Chains, reward
from asyncrl.training.warm_start import Examples, make_model, noisy_values
from tests.support.full_disk import file_size_limit

SHORT = WarmStart(hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=48, steps=10, batch_tokens=200)
seeds = st.integers(0, 2**32)
digit_chains = st.lists(st.integers(0, 9), min_size=2, max_size=12).map(lambda values: Chain(tuple(values)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(SHORT, ChainsTask(), 3, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_a_seed_gives_the_same_bytes_and_another_seed_others(model: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(99)  # the global generator has no say
    assert files(make_model(SHORT, ChainsTask(), 3, tmp_path / "again")) == files(model)
    assert torch.get_num_threads() == threads
    other = files(make_model(SHORT, ChainsTask(), 4, tmp_path / "other"))
    assert other["model.safetensors"] != files(model)["model.safetensors"]


def test_transformers_computes_the_same(model: Path) -> None:
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer("a3b+2c-1=a3b+25")["input_ids"])
    ours, config = load_model(model)
    with torch.no_grad():
        logits = ours.logits(ours(ids, torch.arange(len(ids)), packed_attention([len(ids)])))
        torch.testing.assert_close(logits, theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
    assert config.vocabulary == len(tokenizer)
    assert (theirs.config.eos_token_id, theirs.config.tie_word_embeddings) == (tokenizer.eos_token_id, True)


def test_the_longest_problem_fits_the_positions(model: Path, tokenizer: Tokenizer) -> None:
    longest = Chain(tuple(i % 2 for i in range(ChainsTask().max_size + 1)))
    tokens = tokenizer.encode(longest.prompt + longest.worked(longest.values))
    assert len(tokens) <= load_model(model)[1].raw["max_position_embeddings"]


def test_progress_tells_each_step_and_the_loss_falls(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []
    make_model(SHORT, ChainsTask(), 0, tmp_path, lambda step, loss: told.append((step, loss)))
    assert [step for step, _ in told] == list(range(1, 11))
    assert told[-1][1] < told[0][1]
    assert all(math.isfinite(loss) for _, loss in told)


def test_only_answers_are_learned(tmp_path: Path) -> None:
    """The first loss, computed here by hand: fresh weights, mean over the tokens behind each prompt."""
    once = msgspec.structs.replace(SHORT, steps=1)
    told: list[float] = []
    make_model(once, ChainsTask(), 0, tmp_path, lambda _, loss: told.append(loss))
    fresh = random_model(load_model(tmp_path)[1], 0)
    costs: list[float] = []
    for tokens, prompt in Examples(ChainsTask(), load_tokenizer(tmp_path), once.noise, 0).batch(once.batch_tokens, 1.0):
        with torch.no_grad():
            hidden = fresh(torch.tensor(tokens), torch.arange(len(tokens)), packed_attention([len(tokens)]))
            logp = fresh.logits(hidden).log_softmax(-1)
        costs += [-logp[i - 1, tokens[i]].item() for i in range(prompt, len(tokens))]
    assert told == [pytest.approx(sum(costs) / len(costs), rel=1e-5)]


@given(digit_chains, seeds)
def test_without_noise_the_values_are_right(chain: Chain, seed: int) -> None:
    assert noisy_values(chain, 0.0, Random(seed)) == chain.values


@given(digit_chains, seeds)
def test_with_full_noise_every_step_is_wrong_given_what_was_written(chain: Chain, seed: int) -> None:
    written = noisy_values(chain, 1.0, Random(seed))
    assert written[0] == chain.values[0]
    assert all(0 <= value <= 9 for value in written)
    for i in range(1, len(written)):
        right = (written[i - 1] + chain.values[i] - chain.values[i - 1]) % 10
        assert written[i] != right


def test_the_share_of_wrong_steps_is_the_noise() -> None:
    random, chain = Random(0), Chain((0,) + (1, 0) * 10)
    wrong = 0
    for _ in range(500):
        written = noisy_values(chain, 0.2, random)
        wrong += sum((b - a - d) % 10 != 0 for a, b, d in zip(written, written[1:], (1, -1) * 10, strict=False))
    assert 0.18 < wrong / 10_000 < 0.22  # five standard deviations


def test_problems_grow_from_the_smallest_and_fill_the_budget(tmp_path: Path) -> None:
    tokenizer = save_character_tokenizer(tmp_path, CHARACTERS, END, 256)
    examples = Examples(ChainsTask(), tokenizer, 0.0, 0)
    small, full = examples.batch(5000, 0.0), examples.batch(5000, 1.0)
    assert {prompt for _, prompt in small} == {9}  # a3b+2c-1=
    assert max(prompt for _, prompt in full) > 40
    for batch in (small, full):
        total = sum(len(tokens) for tokens, _ in batch)
        assert 5000 <= total < 5000 + len(batch[-1][0])
        for tokens, prompt in batch:
            text = tokenizer.decode(tokens)
            assert reward(text[:prompt], text[prompt:], _solve(text[:prompt])) == 1.0


def _solve(prompt: str) -> str:
    values = [int(prompt[1])]
    for place in range(2, len(prompt) - 1, 3):
        values.append(values[-1] + int(prompt[place + 1 : place + 3]))
    return Chain(tuple(values)).worked(tuple(values))


def test_examples_are_training_problems_of_another_stream_than_rl(tmp_path: Path) -> None:
    tokenizer = save_character_tokenizer(tmp_path, CHARACTERS, END, 256)
    batch = Examples(ChainsTask(), tokenizer, 0.0, 0).batch(20_000, 1.0)
    prompts = {tokenizer.decode(tokens[:prompt]) for tokens, prompt in batch}
    held_out = {Chains(ChainsTask(), 0).prompt("held_out", index).text for index in range(1000)}
    asked_first = [Chains(ChainsTask(), 0).prompt("train", index).text for index in range(len(batch))]
    assert not prompts & held_out
    assert [tokenizer.decode(tokens[:prompt]) for tokens, prompt in batch] != asked_first


def test_another_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.type=chains only, not for jsonl; set model\.type=checkpoint"):
        make_model(SHORT, JsonlTask(path="x.jsonl"), 0, tmp_path)


@pytest.mark.parametrize("room", [0, 5_000])
def test_a_full_disk_is_a_storage_error(room: int, tmp_path: Path) -> None:
    """Before the first step, and after the last one."""
    with file_size_limit(room), pytest.raises(StorageError, match="make room and try again"):
        make_model(msgspec.structs.replace(SHORT, steps=2), ChainsTask(), 0, tmp_path / "model")
