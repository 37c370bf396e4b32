"""`asyncrl top RUN`: watch a run from another terminal. It reads the run's directory and nothing else."""

import select
import sys
import termios
import time
import tty
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncrl.observe.top import Load, Snapshot, Watch

REFRESH_S = 1.0
BARS = "▁▂▃▄▅▆▇█"
COLORS = {"running": "green", "starting": "yellow", "ended": "cyan", "dead": "red"}
LINES = {
    "completions": "{running} running   {waiting} waiting   on {replicas} engines",
    "buffer": "{in_flight} in flight   {buffered} buffered   {dropped} dropped",
    "staleness": "{staleness_mean:.2f} on average   {staleness_max} at most",
}
WAITS = {"wait": "waits for data", "train": "trains", "sync": "publishes"}


def top(run: Path) -> None:
    """A live view until `q`, Ctrl-C or the run's end; one look where there is no terminal, or nothing goes on."""
    watch, console = Watch(run), Console(highlight=False, markup=False)
    found = watch.look()
    if console.is_terminal and found.state in ("starting", "running"):
        found = _follow(watch, found, console)
    console.print(draw(found))


def _follow(watch: Watch, found: Snapshot, console: Console) -> Snapshot:
    try:
        with _keys() as wait, Live(draw(found), console=console, screen=True, auto_refresh=False) as live:
            while found.state in ("starting", "running") and wait(REFRESH_S) != "q":
                found = watch.look()
                live.update(draw(found), refresh=True)
    except KeyboardInterrupt:
        pass
    return found


@contextmanager
def _keys() -> Generator[Any, None, None]:
    """A function that waits so long for a key, without a line of the terminal being ended."""
    if not sys.stdin.isatty():
        yield time.sleep
        return
    before = termios.tcgetattr(sys.stdin)

    def wait(seconds: float) -> str:
        return sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else ""

    try:
        tty.setcbreak(sys.stdin)
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def draw(found: Snapshot) -> RenderableType:
    """All of a snapshot, for a terminal of any width."""
    parts = [_headline(found), _figures(found)]
    if found.engines:
        parts.append(_engines(found))
    parts += [_line(event) for event in found.events]
    return Group(*parts)


def _headline(found: Snapshot) -> Text:
    text = Text.assemble((found.name, "bold"), "  ", (_plain(found.says), COLORS[found.state]))
    share = found.step / found.steps if found.steps else 0.0
    text.append(f"\nstep {found.step}/{found.steps} ({share:.0%})  in the loop for {_time(found.elapsed)}")
    if found.remaining is not None:
        text.append(f", about {_time(found.remaining)} to go")
    return text


def _figures(found: Snapshot) -> Table:
    latest = found.latest
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    if not latest:
        table.add_row("no step is finished yet")
        return table
    known = {name: value for name, value in latest.items() if value is not None}
    held_out = "" if found.held_out is None else f"   held-out {found.held_out:.3f}"
    table.add_row("reward", f"{found.rewards[-1]:.3f}  {sparkline(found.rewards)}{held_out}")
    table.add_row("rates", f"{found.samples_per_second:.1f} samples/s   {found.tokens_per_second:,.0f} tokens/s")
    table.add_row("trainer", "   ".join(f"{WAITS[name]} {share:.0%}" for name, share in found.waits.items()))
    for name, form in LINES.items():
        with suppress(KeyError):  # a replay has no engines
            table.add_row(name, form.format_map(known))
    return table


def _engines(found: Snapshot) -> Table:
    rates, load = ("completions/s", "tokens/s", "s/completion"), ("running", "waiting", "busy", "cached", "moved")
    names = ("engine", *rates, *load, "version")
    table = Table(*names, box=None, padding=(0, 2, 0, 0))
    for name, engine in found.engines.items():
        table.add_row(
            _plain(name),
            f"{engine.completions_per_second:.1f}",
            f"{engine.tokens_per_second:,.0f}",
            "" if engine.mean_seconds is None else f"{engine.mean_seconds:.2f}",
            *_load(engine.load),
        )
    return table


def _load(load: Load | None) -> list[str]:
    if load is None:
        return []
    return [
        f"{load.running} of {load.places}" if load.places else str(load.running),
        str(load.waiting),
        "" if load.busy is None else f"{load.busy:.0%}",
        "" if load.cached is None else f"{load.cached:.0%}",
        str(load.moved),
        f"{load.version}, {load.behind} behind" if load.behind > 0 else str(load.version),
    ]


def _line(event: dict[str, Any]) -> Text:
    """Of an event: when, what, and one more word about it."""
    moment = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
    rest = event.get("reason") or event.get("text") or event.get("fault") or event.get("engine") or event.get("step")
    said = "" if rest is None else _plain(str(rest).splitlines()[0])
    text = Text(f"{moment}  {_plain(event['kind'])}  {said}", no_wrap=True, overflow="ellipsis")
    text.stylize("dim", 0, len(moment))
    return text


def sparkline(values: Sequence[float]) -> str:
    """A curve of characters, from the lowest value to the highest."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    width = (high - low) or 1.0
    return "".join(BARS[int((value - low) / width * (len(BARS) - 1))] for value in values)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _plain(text: str) -> str:
    """Control characters become visible instead of being obeyed by the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
