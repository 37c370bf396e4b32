"""A reply between two turns of the model has the ids that the chat template would give it, and can be read back."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncrl.config import Rollout
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import CheckpointError
from tests.support.tiny_chat import END, chat_ids, save_chat_tokenizer

CHAT = Rollout(chat=True)


@pytest.mark.parametrize("reply", ["= 7", "  blanks\n", "ünïcödé"])
def test_ids_are_those_of_the_template(tmp_path: Path, reply: str) -> None:
    save_chat_tokenizer(tmp_path)
    tokenizer, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    (end,) = theirs.encode(END)
    turns = [("user", "3+4"), ("assistant", "ask"), ("user", reply)]
    whole = theirs.apply_chat_template(
        [{"role": role, "content": text} for role, text in turns], add_generation_prompt=True, return_dict=False
    )
    asked = chat_ids(tmp_path, "3+4")
    sampled = [*theirs.encode("ask"), end]
    given = tokenizer.encode_turn(reply, CHAT, after=end)
    assert isinstance(given, list)
    assert [*asked, *sampled, *given] == whole
    assert tokenizer.decode_turn(given, CHAT) == reply

    # A turn that ended in another way gets the template's end as well.
    longer = tokenizer.encode_turn(reply, CHAT, after=end + 1)
    assert longer == [end, *given]
    assert tokenizer.decode_turn(longer, CHAT) == reply


def test_without_a_chat_the_text_is_all(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    given = tokenizer.encode_turn("=7", Rollout(), after=0)
    assert isinstance(given, list)
    assert len(given) == 2
    assert tokenizer.decode_turn(given, Rollout()) == "=7"


def test_a_template_for_one_turn_is_refused(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path, "{{ messages[-1]['content'] }}")
    with pytest.raises(CheckpointError, match="cannot show several turns"):
        load_tokenizer(tmp_path).encode_turn("=7", CHAT, after=0)
