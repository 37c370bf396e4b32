"""The command line. Heavy imports wait until a command needs them, so that help and errors come at once."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.system import install_guard, minimum_versions, quiet
from asyncrl.system.run_directory import owner_only
from pipelines.cli.parser import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """With `arguments` all of it happens in this process; the command line itself has a supervisor."""
    options = parse(arguments)
    if arguments is None:  # else the process and its warnings are somebody else's
        if options.verbose:
            os.environ[quiet.VERBOSE] = "1"
        quiet.quieten()
    if arguments is None and options.command in ("run", "resume"):
        from pipelines.supervision.supervisor import supervise

        return supervise(lambda: _main(options), lambda path: _main(parse(["resume", str(path)])))
    return _main(options)


def _main(options: argparse.Namespace) -> int:
    try:
        install_guard.check()
        if options.command != "doctor":  # it names them among everything else
            minimum_versions.check()
    except ImportError as error:
        return _refuse(error)
    try:
        with owner_only():
            return _execute(options)
    except AsyncRLError as error:
        return _refuse(error, error.exit_code)
    except KeyboardInterrupt:
        print("asyncrl: interrupted", file=sys.stderr)
        return 130


def _execute(options: argparse.Namespace) -> int:
    match options.command:
        case "run":
            return _run(options.overrides)
        case "init":
            return _init(options.directory)
        case "plan":
            return _plan(options)
        case "replay":
            return _replay(options.run, options.overrides, options.out, held_out=options.evaluate)
        case "compare":
            return _compare(options.runs, options.metric, options.out)
        case "drafter":
            return _drafter(options)
        case "submit":
            return _submit(options)
        case "check":
            return _check(options.run)
        case "chaos":
            return _chaos(options)
        case "simulate":
            return _simulate(options)
        case "report" | "trace" | "top" | "query" | "doctor":
            return _look(options)
        case _:
            return _resume(options.run, options.overrides)


WAYS = """\
nothing to run yet: `asyncrl run` takes settings as key=value. Three ways to begin:
  asyncrl run experiment=quickstart name=first     the demo: a small model learns sums in minutes, on any CPU
  asyncrl init my-project                          a small project of your own: prompts, a reward, a model, a script
  asyncrl run model=checkpoint model.path=MODEL task=jsonl task.path=prompts.jsonl \\
              reward.function=reward.py:reward name=mine
`asyncrl run --help` explains settings, and `asyncrl plan` with the same settings says what a run would need"""


def _init(directory: Path) -> int:
    from pipelines.cli.init import init

    init(directory, lambda text: print(text, flush=True))
    return 0


def _run(overrides: Sequence[str]) -> int:
    if not overrides:
        raise ConfigError(WAYS)
    from pipelines.compose import compose

    run = compose(overrides)
    from pipelines.train import train

    return train(run)


def _plan(options: argparse.Namespace) -> int:
    from rich.console import Console

    from pipelines.compose import compose, to_yaml
    from pipelines.plan.plan import preflight
    from pipelines.plan.render import show
    from pipelines.plan.trial import tried

    run = compose(options.overrides)
    if options.config:
        print(to_yaml(run), end="")
        return 0
    from pipelines.fleet.cluster_offer import look

    console = Console(highlight=False, markup=False)
    offer, pace = look(run), None
    if options.profile or options.from_run:
        from pipelines.cli import simulate

        pace = simulate.pace(run, profile=options.profile, from_run=options.from_run)
    show(run, console, offer, pace)
    preflight(run, offer)
    for line in tried(run):
        console.print(line, soft_wrap=True)
    console.print(f"nothing stands in its way: asyncrl run {' '.join(options.overrides)}", soft_wrap=True)
    return 0


def _resume(directory: Path, overrides: Sequence[str]) -> int:
    from pipelines.train import resume

    return resume(directory, overrides)


def _replay(directory: Path, overrides: Sequence[str], out: Path | None, *, held_out: bool) -> int:
    from pipelines.replay import replay

    done = replay(directory, overrides, out=out, held_out=held_out)
    if done.scores:
        print(f"held-out: sampled {done.scores.sampled:.3f}  greedy {done.scores.greedy:.3f}")
    if done.identical:
        print(f"identical: {done.steps} steps again, weights {done.digest}")
        return 0
    print(f"different: {done.steps} steps again, weights {done.digest}, recorded {done.recorded}")
    if done.ranks > 1:
        print(f"the run had trainer.ranks={done.ranks}; in one, sums are rounded in another order")
    return 0 if overrides else 1


def _compare(runs: Sequence[Path], metrics: Sequence[str], out: Path | None) -> int:
    from rich.console import Console

    from pipelines.recording.compare import compare

    compare(runs, Console(highlight=False, markup=False), metrics=metrics, out=out)
    return 0


def _drafter(options: argparse.Namespace) -> int:
    from pipelines.cli import drafter

    if options.action == "export":
        kind = drafter.export(options.run, options.out)
        method = f'{{"method": "{kind}", "model": "{options.out}", "num_speculative_tokens": 3}}'
        print(f"{options.out}: vllm serve MODEL --speculative-config '{method}'")
        return 0
    done = drafter.train(
        options.run, kind=options.kind, steps=options.steps, out=options.out, policy=options.checkpoint
    )
    print(
        f"held-out acceptance length {done.before.length:.3f} -> {done.after.length:.3f} with "
        f"{len(done.after.rates)} drafted tokens, {done.seconds:.0f} s: {done.directory}"
    )
    return 0


def _submit(options: argparse.Namespace) -> int:
    from pipelines.cluster import submit

    if options.follow:
        return submit.follow(options.cluster, options.follow)
    if options.stop:
        return submit.stop(options.cluster, options.stop)
    if options.resume:
        return submit.resume(options.cluster, options.resume, options.overrides, down=options.down)
    return submit.submit(options.cluster, options.overrides, down=options.down)


def _check(directory: Path) -> int:
    from rich.console import Console

    from pipelines.cli.check import check, show

    found = check(directory)
    show(directory, found, Console(highlight=False, markup=False, soft_wrap=True))
    return 0 if found.sound else 1


def _chaos(options: argparse.Namespace) -> int:
    from pipelines.cli.chaos import chaos

    return chaos(
        options.overrides,
        seed=options.seed,
        faults=options.faults.split(","),
        rounds=options.rounds,
        at_least=options.at_least,
    )


def _simulate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from pipelines.cli import simulate

    given = {name: getattr(options, name) for name in simulate.Options.__struct_fields__}
    simulate.run(simulate.Options(**given), Console(highlight=False, markup=False))
    return 0


def _look(options: argparse.Namespace) -> int:
    match options.command:
        case "report":
            from pipelines.recording.report import write_report

            print(write_report(options.run, options.out))
        case "trace":
            from pipelines.cli.trace import write_trace

            print(write_trace(options.run, options.out))
        case "top":
            from pipelines.cli.top import top

            top(options.run)
        case "query":
            from pipelines.cli.query import query

            query(options.run, options.sql, options.format)
        case _:
            from pipelines.cli.doctor import doctor

            return doctor(as_json=options.json, clean=options.clean, model=options.model)
    return 0


def _refuse(error: Exception, code: int = 2) -> int:
    print(f"asyncrl: {error}", file=sys.stderr)
    return code
