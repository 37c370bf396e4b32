"""`asyncrl doctor`: one line for each check, with the command that mends it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.text import Text

from asyncrl.errors import AsyncRLError
from asyncrl.models.config import read_config
from asyncrl.observe.doctor.checks import Verdict, judge
from asyncrl.observe.doctor.gather import gather
from asyncrl.system import ownership
from pipelines.plan.backend import described

COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(*, as_json: bool = False, clean: bool = False, root: Path = Path("runs"), model: Path | None = None) -> int:
    """Exit code: 0 if runs can work here, with this model if one is given, else 1. `clean`: first end what dead runs
    have left behind."""
    facts = gather(root)
    if clean and facts.leftovers.processes:
        ownership.end(_processes(facts.leftovers.processes))
        facts = gather(root)
    verdicts = judge(facts)
    if model is not None:
        verdicts.append(judge_model(model))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(verdicts), indent=1).decode())
    else:
        show(verdicts, Console(highlight=False, markup=False, soft_wrap=True))
    return int(any(verdict.level == "problem" for verdict in verdicts))


def _processes(pids: Sequence[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with suppress(psutil.Error):
            yield psutil.Process(pid)


def judge_model(directory: Path) -> Verdict:
    """Whose code would train it, and what does not go with that."""
    try:
        return Verdict(check="model", level="ok", found=described(read_config(directory, "auto")))
    except AsyncRLError as error:
        return Verdict(check="model", level="problem", found=str(error))


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    width = max(len(verdict.check) for verdict in verdicts)
    for verdict in verdicts:
        mend = f" -> {verdict.mend}" if verdict.mend else ""
        line = f" {verdict.check:{width}}  {verdict.found}{mend}"
        console.print(Text.assemble((f"{verdict.level:7}", COLOURS[verdict.level]), line))
    counts = {level: sum(verdict.level == level for verdict in verdicts) for level in ("problem", "warning")}
    console.print(", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items()))
