"""`asyncrl check RUN`: proves from the directory of a run that the run kept its guarantees."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from asyncrl.buffer.retention import read_pruned
from asyncrl.drop_reasons import describe
from asyncrl.errors import ConfigError
from asyncrl.observe.audit.audit import Audit, audit
from asyncrl.observe.audit.evidence import DamageError
from asyncrl.observe.audit.records import check_events, check_metrics
from asyncrl.system.run_directory import RunDirectory, read_events
from asyncrl.training.checkpoint_manifest import damage, numbered, read_manifest
from asyncrl.types import LedgerCounts
from pipelines.compose import from_yaml


def check(path: Path) -> Audit:
    """Read all of a run's directory; `sound` is the verdict."""
    directory = RunDirectory.open(path)
    run = from_yaml(directory.config)
    if run.buffer.durability == "memory":
        raise ConfigError(f"{path} was run with buffer.durability=memory, which leaves nothing to check")
    saved = [checkpoint for _, checkpoint in numbered(directory.checkpoints)]
    damaged = {checkpoint.name: problem for checkpoint in saved if (problem := damage(checkpoint))}
    manifests = {checkpoint.name: read_manifest(checkpoint) for checkpoint in saved if checkpoint.name not in damaged}
    summary = directory.read_summary()
    found = audit(directory.trajectories, run.name, manifests, summary)
    found.violations += [f"checkpoint {name} is damaged: {problem}" for name, problem in damaged.items()]
    if summary is None and directory.summary.exists():
        found.violations.append("summary.json cannot be read: the run has to be resumed, which writes it anew")
    lost = max((event["step"] for event in read_events(directory.events, "metrics_damaged")), default=0)
    try:
        found.rows = check_metrics(directory.metrics, found.steps, summary, lost)
        found.events = check_events(directory.events)
    except DamageError as damaged_file:
        found.violations.append(str(damaged_file))
    return found


def show(path: Path, found: Audit, console: Console) -> None:
    for name, text in _table(RunDirectory(path), found):
        console.print(f"{name:<12}{text}")


def conservation(ledger: LedgerCounts) -> str:
    """The sum by where the slots are."""
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(ledger.dropped.items()))
    return (
        f"{ledger.leased} = {ledger.in_flight} in flight + {ledger.buffered} buffered + {ledger.consumed} consumed "
        f"+ {sum(ledger.dropped.values())} dropped" + (f" ({dropped})" if dropped else "")
    )


def _table(directory: RunDirectory, found: Audit) -> Iterator[tuple[str, str]]:
    attempts = len(read_events(directory.events, "fleet_started"))
    saved = [path.name for _, path in numbered(directory.checkpoints)]
    yield "run", f"{directory.path}: {found.steps} steps, actors placed {attempts} times"
    yield "journal", f"{found.journal.frames} records in {found.journal.files} files, {_torn(found.journal.torn_bytes)}"
    yield "log", f"{found.log.frames} trajectories in {found.log.files} files, {_torn(found.log.torn_bytes)}"
    if pruned := read_pruned(directory.trajectories):
        yield "pruned", f"{pruned}, as buffer.keep says"
    yield "slots", conservation(found.ledger)
    for reason, count in sorted(found.ledger.dropped.items()):
        yield "dropped", f"{count} {reason}: {describe(reason).meaning}"
    yield "checkpoints", f"{len(saved)}, the newest is {saved[-1]}" if saved else "none"
    yield "metrics", f"{found.rows} steps"
    yield "events", f"{found.events.lines} lines, {found.events.torn} left unfinished by a kill"
    if found.sound:
        yield "verdict", f"sound: the sums hold after each of {found.journal.frames} records"
    for text in found.violations:
        yield "VIOLATION", text


def _torn(count: int) -> str:
    return f"{count} bytes of an unfinished write" if count else "every byte checksummed"
