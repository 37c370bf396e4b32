"""JSON-lines prompts: an index is a position, the splits are apart, a bad line is named."""

import json
from pathlib import Path

import pytest

from asyncrl.config.task import JsonlTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.registry import make_task
from asyncrl.tasks.tables import Jsonl


def write(path: Path, rows: list[dict[str, str]]) -> JsonlTask:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlTask(path=str(path), held_out=0.2)


@pytest.fixture
def settings(tmp_path: Path) -> JsonlTask:
    return write(tmp_path / "sums.jsonl", [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(50)])


def test_each_epoch_is_a_new_order_of_all_rows(settings: JsonlTask) -> None:
    task = make_task(settings, seed=3)
    epochs = [[task.prompt("train", epoch * 40 + i) for i in range(40)] for epoch in range(2)]
    assert len({prompt.text for prompt in epochs[0]}) == 40
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]
    assert all(prompt.answer == str(2 * int(prompt.text.partition("+")[0])) for prompt in epochs[0])


def test_a_position_needs_no_history(settings: JsonlTask) -> None:
    walked = make_task(settings, seed=3)
    for index in range(97):
        walked.prompt("train", index)
    assert walked.prompt("train", 97) == make_task(settings, seed=3).prompt("train", 97)
    orders = [[make_task(settings, seed).prompt("train", i).text for i in range(40)] for seed in (3, 4)]
    assert orders[0] != orders[1]


def test_equal_texts_stay_in_one_split_whatever_the_seed_and_the_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i % 10}", "answer": str(i)} for i in range(30)]
    held: list[set[str]] = []
    for seed, order in ((0, rows), (1, rows[::-1])):
        task = Jsonl(write(tmp_path / "rows.jsonl", order), seed)
        train = {task.prompt("train", i).text for i in range(24)}
        held.append({task.prompt("held_out", i).text for i in range(6)})
        assert (len(train), len(held[-1])) == (8, 2)
        assert not train & held[-1]
    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"', r"line 3: Input data was truncated"),
        (b'{"question": "x"}', r"line 3: no column 'prompt'"),
        (b'{"prompt": ""}', r"line 3: the prompt is empty"),
        (b'{"prompt": "\xff"}', r"line 3: not UTF-8 at byte 13 \(0xff, 'ÿ' in Latin-1\): convert the file"),
        (b"[]", r"line 3: Expected `object`, got `array`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, {message}"):
        make_task(JsonlTask(path=str(path)), seed=0)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.path=.*nowhere\.jsonl cannot be read: No such file"):
        make_task(JsonlTask(path=str(tmp_path / "nowhere.jsonl")), seed=0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        make_task(JsonlTask(path=str(tmp_path / "empty.jsonl")), seed=0)


def test_one_row_is_trained_on_and_evaluation_says_what_to_do(tmp_path: Path) -> None:
    task = make_task(write(tmp_path / "one.jsonl", [{"prompt": "x"}]), seed=0)
    assert {task.prompt("train", i).text for i in range(5)} == {"x"}
    with pytest.raises(ConfigError, match=r"raise task\.held_out or set evaluation\.prompts=0"):
        task.prompt("held_out", 0)


def test_a_suite_may_hold_out_every_row(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(5)))
    task = Jsonl(JsonlTask(path=str(path), held_out=1), seed=0)
    assert {task.prompt("held_out", index).text for index in range(5)} == {f"{n}+1=" for n in range(5)}
    with pytest.raises(
        ConfigError, match=r"task.held_out=1(\.0)? leaves no prompt to train on in .*: lower task.held_out"
    ):
        task.prompt("train", 0)
