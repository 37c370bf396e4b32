"""Examples: what is read, what is left out and counted, in which order each is drawn, what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from asyncrl.config import Run, load
from asyncrl.config.sft import Sft
from asyncrl.data.arrow import decode, encode
from asyncrl.data.order import Order
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.supervised.examples import Examples, load_examples
from asyncrl.types import GIVEN, Ticket, Trajectory
from tests.support.chat_families import FAMILIES
from tests.support.tiny_chat import END, save_chat_tokenizer

Message = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}


def chat(question: str, *replies: str) -> list[Message]:
    messages: list[Message] = []
    for number, reply in enumerate(replies):
        messages += [
            {"role": "user", "content": f"{question} {number}?"},
            {"role": "assistant", "content": reply},
        ]
    return messages


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A model with a chat template, and where tables are written."""
    save_chat_tokenizer(tmp_path)
    return tmp_path


SUPERVISED: dict[str, Any] = {"pipeline": "sft", "rollout": {"replicas": 0}, "sft": {"path": "x"}}


def write(directory: Path, rows: Sequence[Any], name: str = "chats.jsonl") -> str:
    path = directory / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(path: str, *, seed: int = 0, steps: int = 1, chat: bool = False, system: str = "", **sft: Any) -> Run:
    return load(
        {
            "seed": seed,
            "steps": steps,
            "pipeline": "sft",
            "algorithm": {"type": "sft"},
            "rollout": {"replicas": 0, "group_size": 1, "chat": chat, "system": system},
            "flow": {"groups_per_step": 4},
            "sft": {"path": path, "held_out": 0.0, **sft},
        }
    )


def examples(directory: Path, path: str, **changes: Any) -> Examples:
    return load_examples(run(path, **changes), directory)


def ticket(group: int, version: int = 0) -> Ticket:
    return Ticket(group=group, samples=(0,), version=version, deadline=0.0)


def said(directory: Path, trajectory: Trajectory) -> list[str]:
    tokenizer = load_tokenizer(directory)
    return [tokenizer.decode(each.tokens, special_tokens=True) for each in trajectory.segments if each.version != GIVEN]


def drawn(found: Examples, indices: Sequence[int]) -> list[str]:
    return [found.read(ticket(index))[0].prompt for index in indices]


# What is read.


def test_a_chat_is_what_the_model_is_given_and_what_it_should_say(chats: Path) -> None:
    found = examples(chats, write(chats, [{"messages": chat("Sum", "one", "two")}]))
    (trajectory,) = found.read(ticket(3, version=7))
    assert (trajectory.slot.group, trajectory.slot.sample, trajectory.prompt) == (3, 0, "chats.jsonl:1")
    assert trajectory.oldest_version == 7, "as fresh as its ticket: staleness never drops it"
    assert said(chats, trajectory) == [f"one{END}", f"two{END}"]
    assert not trajectory.logprobs.any()
    assert (trajectory.reward, trajectory.finish, trajectory.episode) == (0.0, "stop", None)
    assert decode(encode(trajectory)) == trajectory, "as it travels"


def test_only_the_last_turn_and_messages_that_do_not_count(chats: Path) -> None:
    messages = chat("Sum", "one", "two", "three")
    path = write(chats, [{"messages": messages}])
    assert said(chats, examples(chats, path, train_on="last").read(ticket(0))[0]) == [f"three{END}"]
    messages[3] = messages[3] | {"weight": 0}
    path = write(chats, [{"messages": messages}])
    assert said(chats, examples(chats, path).read(ticket(0))[0]) == [f"one{END}", f"three{END}"]


def test_texts_stand_behind_one_another_or_in_the_chat_template(chats: Path) -> None:
    path = write(chats, [{"prompt": "1+1=", "completion": "2"}, {"prompt": "[1] is", "completion": "a list"}])
    tokenizer = load_tokenizer(chats)
    plain = examples(chats, path, shuffle=False)
    texts = [tokenizer.decode(plain.read(ticket(i))[0].tokens, special_tokens=True) for i in range(2)]
    assert texts == [f"1+1=2{END}", f"[1] isa list{END}"]
    shown = examples(chats, path, shuffle=False, chat=True, system="Add.").read(ticket(0))[0]
    as_chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    same = write(chats, [{"messages": [*as_chat, {"role": "assistant", "content": "2"}]}])
    assert np.array_equal(shown.tokens, examples(chats, same).read(ticket(0))[0].tokens)


def test_texts_need_no_chat_template(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path, template=None)
    rows = [{"prompt": "1+1=", "completion": "2"}, {"messages": chat("Sum", "one")}]
    found = examples(tmp_path, write(tmp_path, rows), shuffle=False)
    assert [said(tmp_path, found.read(ticket(i))[0]) for i in range(2)] == [[f"2{END}"], [f"one{END}"]]


def test_a_completion_that_has_its_end_gets_no_second_one(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path, template=None)
    found = examples(tmp_path, write(tmp_path, [{"prompt": "1+1=", "completion": f"2{END}"}]))
    assert said(tmp_path, found.read(ticket(0))[0]) == [f"2{END}"]


def test_a_first_token_is_not_predicted(tmp_path: Path) -> None:
    """Nothing is before it."""
    save_chat_tokenizer(tmp_path, template=None)
    found = examples(tmp_path, write(tmp_path, [{"prompt": "", "completion": "plain text"}]))
    assert said(tmp_path, found.read(ticket(0))[0]) == [f"lain text{END}"]


def test_messages_as_prompt_and_completion(chats: Path) -> None:
    messages = chat("Sum", "one", "two", "three")
    row = {"prompt": messages[:3], "completion": messages[3:]}
    (trajectory,) = examples(chats, write(chats, [row])).read(ticket(0))
    assert said(chats, trajectory) == [f"two{END}", f"three{END}"], "the first turn belongs to the prompt"
    whole = examples(chats, write(chats, [{"messages": messages}])).read(ticket(0))[0]
    assert np.array_equal(trajectory.tokens, whole.tokens)


def test_other_columns(chats: Path) -> None:
    path = write(chats, [{"conversation": chat("Sum", "one")}])
    assert len(examples(chats, path, messages="conversation")) == 1
    path = write(chats, [{"question": "1+1=", "solution": "2"}])
    assert len(examples(chats, path, prompt="question", completion="solution")) == 1


def tool_chat() -> list[Message]:
    call = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "a"}'}}
    return [
        {"role": "user", "content": "Look a up."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "b"},
        {"role": "assistant", "content": "It is b."},
    ]


@pytest.mark.parametrize("stored", ["jsonl", "json", "parquet", "directory", "saved"])
def test_every_table_gives_the_same_tokens(stored: str, tmp_path: Path) -> None:
    """Also where rows of Parquet have all columns, and null in those that they lack, and where lists are JSON texts."""
    FAMILIES["qwen2.5"].save(tmp_path)
    rows = [{"messages": tool_chat(), "tools": [TOOL]}, {"messages": chat("Sum", "one", "two")}]
    expected = [examples(tmp_path, write(tmp_path, rows), shuffle=False).read(ticket(i))[0] for i in range(2)]
    assert said(tmp_path, expected[0])[0].startswith("<tool_call>\n")
    table = pa.Table.from_pylist([row | {"tools": json.dumps(row.get("tools", []))} for row in rows])
    path = str(tmp_path / "table")
    match stored:
        case "jsonl":
            path = write(tmp_path, [{name: json.dumps(value) for name, value in row.items()} for row in rows])
        case "json":
            (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
            path = str(tmp_path / "array.json")
        case "parquet":
            pq.write_table(table, path := f"{path}.parquet")
        case "directory":
            (tmp_path / "table").mkdir()
            pq.write_table(table.slice(0, 1), f"{path}/a.parquet")
            pq.write_table(table.slice(1), f"{path}/b.parquet")
        case _:
            datasets = pytest.importorskip("datasets")
            datasets.Dataset(table).save_to_disk(path)
    found = examples(tmp_path, path, shuffle=False)
    for index, each in enumerate(expected):
        (trajectory,) = found.read(ticket(index))
        assert np.array_equal(trajectory.tokens, each.tokens)
        assert np.array_equal(trajectory.versions, each.versions)


def test_a_conversation_whose_history_changes_travels_as_a_tree(tmp_path: Path) -> None:
    FAMILIES["qwen3"].save(tmp_path)
    found = examples(tmp_path, write(tmp_path, [{"messages": chat("Sum", "one", "two")}]))
    (trajectory,) = found.read(ticket(0))
    assert len(trajectory.branches) == 1
    assert decode(encode(trajectory)) == trajectory
    assert said(tmp_path, trajectory) == [f"<think>\n\n</think>\n\n{text}<|im_end|>" for text in ("one", "two")]
    assert any("trained turn by turn" in line for line in found.told())


# What is too long.


def test_what_is_too_long_is_left_out_or_cut_and_counted(chats: Path) -> None:
    rows = [{"messages": chat("Sum", "one", "two" * 40)}, {"messages": chat("Sum", "three")}]
    path, tokenizer = write(chats, rows), load_tokenizer(chats)
    assert len(examples(chats, path)) == 2
    left = examples(chats, path, max_length=120)
    assert drawn(left, range(2)) == ["chats.jsonl:2"] * 2
    assert "1 examples of more than sft.max_length=120 tokens are left out" in " ".join(left.told())
    cut = examples(chats, path, max_length=120, too_long="cut", shuffle=False)
    (trajectory,) = cut.read(ticket(0))
    assert (len(trajectory.tokens), trajectory.finish) == (120, "length")
    whole = examples(chats, path, shuffle=False).read(ticket(0))[0]
    assert np.array_equal(trajectory.tokens, whole.tokens[:120])
    assert np.array_equal(trajectory.versions, whole.versions[:120])
    assert tokenizer.decode(trajectory.tokens[-6:]) == "otwotw"
    assert "are cut" in " ".join(cut.told())
    shorter = examples(chats, path, max_length=80, too_long="cut", shuffle=False).read(ticket(0))[0]
    assert said(chats, shorter) == [f"one{END}"], "what follows the last token that is learned is left out"


def test_nothing_left_says_what_to_do(chats: Path) -> None:
    path = write(chats, [{"messages": chat("Sum", "one")}])
    with pytest.raises(
        ConfigError, match=r"nothing is left of its 1 examples, of which 1 have more than sft\.max_length=9 "
    ):
        examples(chats, path, max_length=9)
    with pytest.raises(ConfigError, match=r"raise sft\.max_length"):
        examples(chats, path, max_length=9, too_long="cut")


# The order.


@given(rows=st.integers(1, 60), seed=st.integers(0, 99), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_row_comes_once_in_each_epoch(rows: int, seed: int, epoch: int) -> None:
    order = Order(rows, seed, "train")
    assert sorted(order[epoch * rows + position] for position in range(rows)) == list(range(rows))


@given(
    rows=st.integers(1, 60), seed=st.integers(0, 99), index=st.integers(0, 500), others=st.lists(st.integers(0, 500))
)
@settings(max_examples=60, deadline=None)
def test_a_resumed_run_goes_on_from_any_index(rows: int, seed: int, index: int, others: list[int]) -> None:
    walked = Order(rows, seed, "train")
    for other in others:
        walked[other]
    fresh = Order(rows, seed, "train")
    assert [walked[index + i] for i in range(rows)] == [fresh[index + i] for i in range(rows)]


def test_epochs_differ_seeds_differ_and_the_order_of_the_file_is_kept_if_wanted(chats: Path) -> None:
    path = write(chats, [{"messages": chat(f"Sum {i}", "one")} for i in range(30)])
    found = examples(chats, path, seed=3)
    first, second = drawn(found, range(30)), drawn(found, range(30, 60))
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != drawn(examples(chats, path, seed=4), range(30))
    assert drawn(examples(chats, path, seed=3), range(17, 47)) == (first + second)[17:47], "without a history"
    inorder = drawn(examples(chats, path, shuffle=False), range(60))
    assert inorder == [f"chats.jsonl:{i + 1}" for i in range(30)] * 2


def test_more_steps_than_the_epochs_have_examples_are_refused(chats: Path) -> None:
    path = write(chats, [{"messages": chat(f"Sum {i}", "one")} for i in range(10)])
    assert "steps=5 of 4 examples are 2 epochs" in examples(chats, path, steps=5, epochs=2).told()[0]
    with pytest.raises(ConfigError, match=r"steps=6 .* are 3 epochs of 10 examples, and sft\.epochs=2; set steps=5"):
        examples(chats, path, steps=6, epochs=2)
    few = write(chats, [{"messages": chat("Sum", "one")}], "few.jsonl")
    with pytest.raises(ConfigError, match=r"set flow\.groups_per_step=1 or less, and steps with it"):
        examples(chats, few, epochs=1)


# The held-out ones.


def test_held_out_examples_are_never_drawn_and_the_same_for_every_seed_and_order(chats: Path) -> None:
    rows = [{"messages": chat(f"Sum {i % 20}", "one")} for i in range(40)]
    held = []
    for seed, order in ((0, rows), (1, rows[::-1])):
        found = examples(chats, write(chats, order), seed=seed, held_out=0.1)
        kept = {trajectory.tokens.tobytes() for trajectory in found.held_out()}
        assert len(found) == 36, "duplicates are kept out together"
        assert not kept & {found.read(ticket(index))[0].tokens.tobytes() for index in range(36)}
        held.append(kept)
    assert held[0] == held[1]
    assert len(held[0]) == 2
    few = msgspec.structs.replace(run(write(chats, rows), held_out=0.5))
    few = msgspec.structs.replace(few, evaluation=msgspec.structs.replace(few.evaluation, prompts=3))
    assert len(load_examples(few, chats).held_out()) == 3
    assert examples(chats, write(chats, rows), held_out=0.0).held_out() == []


# What is refused.


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"text": "x"},
            r"line 1: no column 'messages', and none 'prompt' and 'completion': known here: text; set sft\.",
        ),
        ({"prompt": "x", "answer": "y"}, r"line 1: no column 'messages', and none 'completion'"),
        ({"messages": []}, r"line 1: messages is \[\], and not a list of messages such as"),
        ({"messages": "hello"}, r"line 1: messages is 'hello', and not a list of messages"),
        (
            {"messages": [{"from": "human", "value": "x"}]},
            r"line 1: message 1 of messages is .*: each has a role, one of",
        ),
        ({"messages": [{"role": "user", "content": "x"}]}, r"line 1: no message is the assistant's"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "x"}]},
            r"line 1: a message has content of the type 'image_url'; the policy reads text only",
        ),
        ({"messages": tool_chat(), "tools": [TOOL]}, r"line 1: the call has tools, and the model's chat template"),
        (5, r"line 1: Expected `object`, got `int`; expected an object such as \{\"messages\""),
    ],
)
def test_a_bad_row_is_named(chats: Path, row: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=r"chats\.jsonl, " + said):
        examples(chats, write(chats, [row]))


def test_a_bad_table_is_named(chats: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.path=.*nowhere\.jsonl cannot be read: No such file"):
        examples(chats, str(chats / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"sft\.path=.*empty\.jsonl holds no example; write one JSON object"):
        examples(chats, write(chats, [], "empty.jsonl"))
    pq.write_table(pa.table({"text": ["x"]}), chats / "other.parquet")
    with pytest.raises(ConfigError, match=r"sft\.path=.*other\.parquet: no column 'messages'"):
        examples(chats, str(chats / "other.parquet"))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"sft": {"max_length": 9}}, "sft.* is set and sft.path is not: name the examples"),
        (SUPERVISED, "sft.path=x: algorithm=grpo learns from samples with rewards, and examples have none"),
        (
            SUPERVISED | {"algorithm": {"type": "sft"}},
            "rollout.group_size=8: an example is a group of its own; set rollout.group_size=1",
        ),
        (
            {"algorithm": {"type": "sft", "kl": {"coefficient": 0.1}}},
            "algorithm.kl.coefficient=0.1: algorithm=sft learns from data",
        ),
        ({"algorithm": {"type": "sft", "dynamic_sampling": True}}, "algorithm.dynamic_sampling=true: algorithm=sft"),
        (
            {"algorithm": {"type": "sft", "overlong": {"penalty": 1.0}}},
            "algorithm.overlong.penalty=1: algorithm=sft learns from data",
        ),
        (
            {"algorithm": {"type": "sft"}, "correction": {"type": "custom", "function": "mine.py:f"}},
            "correction=custom: algorithm=sft learns from data, which no policy of the run has sampled",
        ),
    ],
)
def test_settings_that_do_not_go_with_data_are_refused(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(raw)
    assert said in str(caught.value)


def test_a_run_on_data_replays_no_routes_and_any_temperature_goes() -> None:
    raw: dict[str, Any] = {"algorithm": {"type": "sft"}, "rollout": {"group_size": 1, "temperature": 0}}
    assert not load(raw | {"engine": {"type": "native"}}).replays_routes
    assert load({"engine": {"type": "native"}}).replays_routes
    assert load({}).sft == Sft()
