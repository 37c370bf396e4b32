"""Prompts from Parquet, Hugging Face datasets and Python: the same rules as for JSON lines, columns by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config import Rollout
from asyncrl.config.task import DatasetTask, JsonlTask, ParquetTask, PythonTask, TaskSettings
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import keep_here
from asyncrl.tasks.registry import make_task
from tests.support.tiny_chat import chat_ids, save_chat_tokenizer

ROWS = [{"question": f"{i}+{i}=", "solution": 2 * i, "other": None} for i in range(40)]
COLUMNS: dict[str, Any] = {"prompt": "question", "answer": "solution", "held_out": 0.25}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, TaskSettings]:
    table = pa.Table.from_pylist(ROWS)
    (tmp_path / "parts").mkdir()
    pq.write_table(table, tmp_path / "all.parquet")
    for part in range(2):
        pq.write_table(table.slice(20 * part, 20), tmp_path / "parts" / f"{part}.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved, "test": saved.select(range(3))}).save_to_disk(str(tmp_path / "splits"))
    return {
        "parquet": ParquetTask(path=str(tmp_path / "all.parquet"), **COLUMNS),
        "directory": ParquetTask(path=str(tmp_path / "parts"), **COLUMNS),
        "jsonl": JsonlTask(path=str(tmp_path / "rows.jsonl"), **COLUMNS),
        "dataset": DatasetTask(name=str(tmp_path / "one"), **COLUMNS),
        "split": DatasetTask(name=str(tmp_path / "splits"), **COLUMNS),
    }


def test_every_source_gives_the_same_prompts(sources: dict[str, TaskSettings]) -> None:
    seen = {
        name: [(task.prompt("train", i).text, task.prompt("train", i).answer) for i in range(60)]
        for name, task in ((name, make_task(settings, seed=3)) for name, settings in sources.items())
    }
    assert all(prompts == seen["jsonl"] for prompts in seen.values())
    assert set(seen["jsonl"]) <= {(f"{i}+{i}=", str(2 * i)) for i in range(40)}
    assert len(set(seen["jsonl"][:30])) == 30
    held_out = {make_task(sources["parquet"], 3).prompt("held_out", i).text for i in range(10)}
    assert len(held_out) == 10
    assert not held_out & {text for text, _ in seen["jsonl"]}


@pytest.mark.parametrize("source", ["parquet", "jsonl", "dataset"])
def test_a_missing_column_is_named_with_those_that_exist(sources: dict[str, TaskSettings], source: str) -> None:
    wrong = msgspec.structs.replace(sources[source], prompt="questoin")
    with pytest.raises(ConfigError, match=r"no column 'questoin': did you mean question\?.*other, question, solution"):
        make_task(wrong, 0)
    with pytest.raises(ConfigError, match="no column 'right'"):
        make_task(msgspec.structs.replace(sources[source], answer="right"), 0)
    assert make_task(msgspec.structs.replace(sources[source], answer=""), 0).prompt("train", 0).answer == ""


def test_what_is_not_there_is_said(sources: dict[str, TaskSettings], tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "nothing").mkdir()
    for settings, message in (
        (ParquetTask(path=str(tmp_path / "bad.parquet")), r"bad\.parquet cannot be read"),
        (ParquetTask(path=str(tmp_path / "none.parquet")), r"none\.parquet cannot be read"),
        (ParquetTask(path=str(tmp_path / "nothing")), "a directory without a .parquet file"),
        (DatasetTask(name=str(tmp_path / "splits"), split="tset"), r"no split 'tset': did you mean test\?"),
        (DatasetTask(name=str(tmp_path / "nothing")), "cannot be loaded"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_task(settings, 0)


def test_a_chat_is_a_prompt_with_its_earlier_turns(tmp_path: Path) -> None:
    turns = ["1+1=", "2", "2+2="]
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    pq.write_table(pa.Table.from_pylist([{"prompt": chat}]), tmp_path / "chats.parquet")
    prompt = make_task(ParquetTask(path=str(tmp_path / "chats.parquet")), 0).prompt("train", 0)
    assert (prompt.earlier, prompt.text) == (("1+1=", "2"), "2+2=")
    save_chat_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_prompt(prompt, Rollout(chat=True)) == chat_ids(tmp_path, *turns)
    with pytest.raises(ConfigError, match=r"set rollout\.chat=true"):
        tokenizer.encode_prompt(prompt, Rollout())
    with pytest.raises(ConfigError, match=r"a system message belongs into rollout\.system"):
        make_task(PythonTask(function=keep_here(lambda: [{"prompt": [{"role": "system", "content": "x"}]}], "s")), 0)


def here(items: Any) -> PythonTask:
    return PythonTask(function=keep_here(lambda: items, "items"), held_out=0.25)


def test_python_lists_of_texts_pairs_and_mappings() -> None:
    task = make_task(here(["a", ("b", 2), {"prompt": "c", "answer": "3"}, ("d", ["4"])]), 0)
    found = {(p.text, p.answer) for p in [task.prompt("train", i) for i in range(3)] + [task.prompt("held_out", 0)]}
    assert found == {("a", ""), ("b", "2"), ("c", "3"), ("d", '["4"]')}


def test_an_endless_generator_is_read_as_far_as_it_is_needed() -> None:
    read = list[int]()

    def numbers() -> Iterator[tuple[str, int]]:
        i = 0
        while True:
            read.append(i)
            yield f"{i}?", i
            i += 1

    settings = here(numbers())
    task, again = make_task(settings, 0), make_task(settings, 0)
    train = [task.prompt("train", i).text for i in range(20)]
    assert [again.prompt("train", i).text for i in range(20)] == train, "a generator is read once, and kept"
    assert len(read) < 40
    assert not {task.prompt("held_out", i).text for i in range(3)} & set(train)


def test_a_short_generator_begins_again_and_bad_items_are_shown() -> None:
    task = make_task(here(iter(["a", "b"])), 0)
    assert [task.prompt("train", i).text for i in range(4)] == ["a", "b", "a", "b"]
    with pytest.raises(ConfigError, match=r"gives no prompt for held_out; give more, or set evaluation\.prompts=0"):
        task.prompt("held_out", 0)
    for items, message in (([3], "3 is no prompt; give a text"), (3, "cannot be iterated over"), ([], "no prompt")):
        with pytest.raises(ConfigError, match=message):
            make_task(here(items), 0)
