"""The tables of docs/agent-templates.md say what is found from the templates."""

import re
from pathlib import Path

from asyncrl.chat.tool_formats import TOOL_FORMATS
from tests.support.chat_families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "agent-templates.md").read_text()
ROWS = {
    "Qwen2.5": "qwen2.5",
    "Qwen3": "qwen3",
    "Qwen3.5, Qwen3.6": "qwen3.6",
    "Hermes 2 Pro": "hermes",
    "Llama 3.1, 3.2": "llama3.1",
    "Mistral Nemo": "mistral",
    "Ministral 3, Devstral 2": "ministral",
    "gpt-oss": "gpt-oss",
}


def test_the_table_of_families(tmp_path: Path) -> None:
    rows = re.findall(r"^\| ([^|`]+?) +\| `(\w+)` \|([^|]*)\| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(ROWS)
    for title, tool_format, reasoning, changes in rows:
        family = FAMILIES[ROWS[title]]
        (directory := tmp_path / ROWS[title]).mkdir()
        _, chat = family.load(directory)
        assert chat.tool_format == tool_format
        assert bool(reasoning.strip()) == family.reasoning
        said = chat.not_append_only()
        assert said.startswith(f"the chat template {changes}: ") if said else changes == "nothing"


def test_the_table_of_formats() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(TOOL_FORMATS)
