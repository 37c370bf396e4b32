"""What the gateway keeps for `previous_response_id`."""

import tracemalloc

import msgspec
import numpy as np
import pytest

from asyncrl.chat import Message, Reply
from asyncrl.gateway.apis.responses import Responses
from asyncrl.gateway.call import Answers, History
from asyncrl.gateway.record import Answer

TURNS, CHARACTERS = 60, 4000


def _answers(number: int, text: str) -> Answers:
    answer = Answer(Reply(text), "stop", np.empty(0, np.int32), np.empty(0, np.float32))
    return Answers(str(number), 0.0, 0, [answer], str)


def _text(number: int) -> str:
    return f"{number:04}" + "x" * CHARACTERS


@pytest.mark.parametrize("chained", [False, True], ids=["all of it again", "previous_response_id"])
def test_a_long_conversation_is_kept_once(chained: bool) -> None:
    history, said, expected = History(), list[Message](), list[Message]()
    tracemalloc.start()
    for turn in range(TURNS):
        said.append({"role": "user", "content": _text(2 * turn)})
        expected.append(said[-1])
        body = {"input": said, "previous_response_id": f"resp_{turn - 1}" if chained and turn else None}
        request = msgspec.json.decode(msgspec.json.encode(body), type=Responses)
        assert request.call(history).messages == expected
        reply = _text(2 * turn + 1)
        request.response(_answers(turn, reply), history)
        said = [] if chained else [*said, {"role": "assistant", "content": reply}]
        expected.append({"role": "assistant", "content": reply})
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4 * 2 * TURNS * CHARACTERS  # the messages are here twice; all of each call would be 60 times as much
    assert history.messages(f"resp_{TURNS - 1}") == expected


def test_responses_that_share_a_beginning_are_told_apart() -> None:
    history = History()
    history.add("a", None, [{"role": "user", "content": "go"}, {"role": "assistant", "content": "one"}])
    history.add("b", None, [{"role": "user", "content": "go"}, {"role": "assistant", "content": "two"}])
    history.add("c", "a", [{"role": "user", "content": "on"}])
    contents = {name: [each["content"] for each in history.messages(name)] for name in "abc"}
    assert contents == {"a": ["go", "one"], "b": ["go", "two"], "c": ["go", "one", "on"]}
    assert "c" in history
    assert "d" not in history
