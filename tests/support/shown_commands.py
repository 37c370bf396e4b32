"""The commands that README.md and docs/ show, page by page."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = (
    "asyncrl",
    ".venv/bin/asyncrl",
    "make",
    "python",
    "pip",
    "git",
    "kubectl",
    "cp",
    "ray",
    "vllm",
    "tensorboard",
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S[^\n]*\n)+", re.MULTILINE)


class Command(NamedTuple):
    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def shown(page: Path) -> list[Command]:
    text = page.read_text()
    blocks = [block for language, block in _FENCE.findall(text) if language in ("", "bash", "console", "sh")]
    blocks += _INDENTED.findall(_FENCE.sub("", text))
    name = str(page.relative_to(ROOT))
    return [Command(name, tuple(words)) for block in blocks for line in _lines(block) if (words := _words(line))]


def _lines(block: str) -> Iterator[str]:
    """With continuations joined, and the lines of a `for` loop once for each value."""
    name, values = "", [""]
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        if loop := re.match(r"for (\w+) in (.*?);? *do$", line.strip()):
            name, values = loop[1], loop[2].split()
        elif line.strip() == "done":
            name, values = "", [""]
        else:
            yield from (line.strip().replace(f"${name}", value) if name else line.strip() for value in values)


def _words(line: str) -> list[str]:
    """Of the program that a line starts; what is output or a picture has none."""
    if not line or line.split()[0] not in PROGRAMS:
        return []
    words = shlex.split(line, comments=True)
    return words[: next((i for i, word in enumerate(words) if word in ("&&", "|", ">")), len(words))]
