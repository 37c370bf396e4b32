"""Conversations of a model without a chat template."""

from pathlib import Path

import pytest

from asyncrl.chat import Message
from asyncrl.chat.plain import PlainFormat, chat_format
from asyncrl.data.tokenizer import save_character_tokenizer

ASKED: Message = {"role": "user", "content": "a1b+2="}
MORE: Message = {"role": "user", "content": "b3="}


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut off"])
def test_a_kept_reply_is_continued_as_the_whole_conversation_is_encoded(tmp_path: Path, ended: bool) -> None:
    tokenizer = save_character_tokenizer(tmp_path, "ab+=123", "$", 100)
    chat = chat_format(tokenizer)
    assert isinstance(chat, PlainFormat)
    prompt, said = chat.encode([ASKED]), [*tokenizer.encode_rendered("b+3"), *tokenizer.eos_ids[:ended]]
    reply = chat.parse(said)
    assert reply.content == "b+3"
    messages = [ASKED, reply.message(), MORE]
    following = chat.continuation(messages, (), 2, said[-1])
    assert [*prompt, *said, *(following or ())] == chat.encode(messages)
