"""Prompt files as people have them: each just works, or is refused by one sentence with the line and the way out.

`docs/prompts.md` has the same table.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import quickstart_runs
from tests.support.command import Done, asyncrl
from tests.support.tiny_chat import tiny_chat_model

GOOD = '{"prompt": "a4b+1=", "answer": "a4b+15$"}\n{"prompt": "a5b+1=", "answer": "a5b+16$"}\n'
CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]
DOCS = Path(__file__).parents[2] / "docs" / "prompts.md"


def _plan(root: Path, model: Path, content: str | bytes, *overrides: str) -> Done:
    path = root / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    judge = root / "judge.py"
    judge.write_text("def reward(prompt, completion, answer):\n    return completion == answer\n")
    settings = (*quickstart_runs.SMALL, f"model.path={model}", f"root={root}", "name=run", "evaluation.prompts=0")
    task = ("task=jsonl", f"task.path={path}", f"reward.function={judge}:reward")
    return asyncrl("plan", *settings, *task, *overrides)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("chat"))


WORKS: dict[str, str | bytes] = {
    "blank lines": "\n" + GOOD.replace("\n", "\n\n") + "   \n",
    "an array instead of lines": json.dumps([json.loads(line) for line in GOOD.splitlines()], indent=2),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD.encode(),
    "lines that end as on Windows": GOOD.replace("\n", "\r\n"),
    "duplicates": GOOD * 3,
    "numbers as references": '{"prompt": "a4b+1=", "answer": 5}\n{"prompt": "a5b+1=", "answer": 6.5}\n',
    "no references": '{"prompt": "a4b+1="}\n{"prompt": "a5b+1="}\n',
}
REFUSED: dict[str, tuple[str | bytes, str]] = {
    "an empty file": ("", "prompts.jsonl holds no prompt; write one JSON object with `prompt` per line"),
    "blank lines alone": ("\n \n", "prompts.jsonl holds no prompt; write one JSON object with `prompt` per line"),
    "Latin-1": (
        GOOD.encode() + '{"prompt": "caf\u00e9"}\n'.encode("latin-1"),
        "prompts.jsonl, line 3: not UTF-8 at byte 16 (0xe9, '\u00e9' in Latin-1): convert the file",
    ),
    "UTF-16": (GOOD.encode("utf-16"), "prompts.jsonl is UTF-16: convert it with `iconv -f utf-16 -t utf-8`"),
    "a missing column": (
        GOOD + '{"promt": "x"}\n',
        "prompts.jsonl, line 3: no column 'prompt': did you mean promt?; set task.prompt to one of promt",
    ),
    "a number as prompt": (
        GOOD + '{"prompt": 12}\n',
        "prompts.jsonl, line 3: the prompt is 12, and not a text: write it in quotes",
    ),
    "a list as prompt": (
        GOOD + '{"prompt": ["1+1=", "2+2="]}\n',
        "prompts.jsonl, line 3: ['1+1=', '2+2='] is neither a text nor a chat such as",
    ),
    "an empty prompt": (GOOD + '{"prompt": ""}\n', "prompts.jsonl, line 3: the prompt is empty"),
    "text that is no JSON": (
        GOOD + "What is 1+1?\n",
        'prompts.jsonl, line 3: JSON is malformed: invalid character (byte 0); expected an object such as {"prompt"',
    ),
    "an object over several lines": (
        '{\n  "prompt": "x"\n}\n',
        "prompts.jsonl, line 1: Input data was truncated; expected an object such as",
    ),
    "an item of an array": ('[{"prompt": "a4b+1="}, {"prompt": null}]', "prompts.jsonl, item 2: the prompt is null"),
    "tokens that the tokenizer does not know": (
        GOOD + '{"prompt": "a6b+1=?"}\n',
        "prompt prompts.jsonl:3: the model's tokenizer has no token for '?'; change 'a6b+1=?', or take a model",
    ),
    "a chat without a chat template": (
        json.dumps({"prompt": CHAT}) + "\n",
        "prompt prompts.jsonl:1 has earlier turns of a chat: set rollout.chat=true",
    ),
    "a system message": (
        json.dumps({"prompt": [{"role": "system", "content": "Be brief."}, CHAT[0]]}) + "\n",
        "the user's last; a system message belongs into rollout.system",
    ),
    "a message that is no text": (
        json.dumps({"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]}) + "\n",
        "prompts.jsonl, line 1: the content of message 1 is [{'type': 'text', 'text': '1+1='}], and not a text",
    ),
}


@pytest.mark.parametrize("what", WORKS)
def test_it_just_works(tmp_path: Path, model: Path, what: str) -> None:
    done = _plan(tmp_path, model, WORKS[what])
    assert done.code == 0, done.err
    assert "nothing stands in its way" in done.out


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_in_one_sentence(tmp_path: Path, model: Path, what: str) -> None:
    content, said = REFUSED[what]
    done = _plan(tmp_path, model, content)
    assert done.code == 2, done.out
    assert said in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_prompt_longer_than_the_engine_allows_is_named(tmp_path: Path, model: Path) -> None:
    prompts = GOOD + json.dumps({"prompt": "a4b" + "+1c" * 30 + "="}) + "\n"
    done = _plan(tmp_path, model, prompts, "engine.max_length=100", "rollout.max_tokens=24")
    assert done.code == 2
    assert "engine.max_length=100 is less than the longest prompt with rollout.max_tokens=24" in done.err
    assert "set engine.max_length=118, or lower rollout.max_tokens" in done.err
    assert "or leave out prompt prompts.jsonl:3, which has 94 tokens" in done.err


@pytest.mark.parametrize("prompt", [CHAT, CHAT[:1], "1+1="], ids=["turns", "one message", "text"])
def test_chat_messages_work_with_a_chat_template(tmp_path: Path, chat_model: Path, prompt: Any) -> None:
    rows = json.dumps({"messages": prompt, "answer": "4"}) + "\n"
    settings = ("task.prompt=messages", "rollout.chat=true", "engine.max_length=512", "trainer.dtype=fp32")
    done = _plan(tmp_path, chat_model, rows, *settings)
    assert done.code == 0, done.err


def test_duplicates_never_are_in_both_splits(tmp_path: Path, model: Path) -> None:
    done = _plan(tmp_path, model, GOOD * 3, "evaluation.prompts=4", "task.held_out=0.5")
    assert done.code == 0, done.err


def test_the_page_has_every_case() -> None:
    page = DOCS.read_text()
    assert [what for what in (*WORKS, *REFUSED) if f"| {what} |" not in page] == []
