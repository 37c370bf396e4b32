"""The command line. Heavy imports wait until a command needs them, so that help and refusals come at once."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import asyncrl
from asyncrl import floors, one_tree
from asyncrl.errors import AsyncRLError
from asyncrl.rundir import owner_only

OVERRIDES = """\
settings are given as key=value, on top of configs/base.yaml:
  experiment=quickstart         a named run; the CPU demo
  name=my-run seed=1 steps=50   where it is written (runs/my-run), how it is drawn, how long
  engine=native|vllm|fake       a choice with settings of its own: engine.max_batch=64
  max_staleness=0               synchronous; 2 lets generation run up to two versions ahead
  cluster=local|auto|ADDRESS    a Ray of its own, or one that is there; inprocess runs without
  model=checkpoint model.path=DIRECTORY reward.function=my_reward.py:reward trainer.lr=1e-6
`asyncrl plan --config` prints every setting with its value.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        one_tree.check()
        floors.check()
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
        case "plan":
            return _plan(options.overrides, config_only=options.config)
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
        case _:
            return _resume(options.run)


def _run(overrides: Sequence[str]) -> int:
    from pipelines.compose import compose

    run = compose(overrides)
    from pipelines.train import train

    return train(run)


def _plan(overrides: Sequence[str], *, config_only: bool) -> int:
    from rich.console import Console

    from pipelines.compose import compose, to_yaml
    from pipelines.plan import preflight
    from pipelines.plan_show import show

    run = compose(overrides)
    if config_only:
        print(to_yaml(run), end="")
        return 0
    from pipelines.placement import look

    console = Console(highlight=False, markup=False)
    offer = look(run)
    show(run, console, offer)
    preflight(run, offer)
    console.print(f"nothing stands in its way: asyncrl run {' '.join(overrides)}")
    return 0


def _resume(directory: Path) -> int:
    from pipelines.train import resume

    return resume(directory)


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

    from pipelines.compare import compare

    compare(runs, Console(highlight=False, markup=False), metrics=metrics, out=out)
    return 0


def _drafter(options: argparse.Namespace) -> int:
    from pipelines import drafter

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
    from pipelines import submit

    if options.follow:
        return submit.follow(options.cluster, options.follow)
    if options.stop:
        return submit.stop(options.cluster, options.stop)
    if options.resume:
        return submit.resume(options.cluster, options.resume, down=options.down)
    return submit.submit(options.cluster, options.overrides, down=options.down)


def _check(directory: Path) -> int:
    from rich.console import Console

    from pipelines.check import check, show

    found = check(directory)
    show(directory, found, Console(highlight=False, markup=False, soft_wrap=True))
    return 0 if found.sound else 1


def _chaos(options: argparse.Namespace) -> int:
    from pipelines.chaos import chaos

    return chaos(
        options.overrides,
        seed=options.seed,
        faults=options.faults.split(","),
        rounds=options.rounds,
        at_least=options.at_least,
    )


def _simulate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from pipelines import simulate

    given = {name: getattr(options, name) for name in simulate.Options.__struct_fields__}
    simulate.run(simulate.Options(**given), Console(highlight=False, markup=False))
    return 0


def _refuse(error: Exception, code: int = 2) -> int:
    print(f"asyncrl: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl", description=asyncrl.__doc__)
    parser.add_argument("--version", action="version", version=f"asyncrl {asyncrl.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (("run", "train"), ("plan", "say what would run and what it needs; refuse what cannot work")):
        command = commands.add_parser(
            name, help=text, epilog=OVERRIDES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("overrides", nargs="*", metavar="key=value")
    commands.choices["plan"].add_argument("--config", action="store_true", help="print every setting and nothing else")
    command = commands.add_parser("resume", help="continue a stopped or killed run")
    command.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    command = commands.add_parser(
        "replay", help="train again from the recorded stream, without engines; the same settings give the same weights"
    )
    command.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="another algorithm=, correction=, trainer.*="
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="a new directory for model, metrics and summary")
    command.add_argument("--evaluate", action="store_true", help="answer the run's held-out prompts with the result")
    command = commands.add_parser("compare", help="runs and replays side by side: figures, settings, curves")
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of runs, or of replay --out")
    command.add_argument(
        "--metric", nargs="+", action="extend", default=[], metavar="NAME", help="columns of metrics.parquet, held_out"
    )
    command.add_argument(
        "--out", type=Path, nargs="?", const=Path("compare.html"), metavar="FILE", help="write curves (compare.html)"
    )
    _add_drafter(commands.add_parser("drafter", help="learn a drafting head from a recorded run, or export one"))
    _add_submit(commands.add_parser("submit", help="bring a cluster up with `ray up`, train on it, follow the log"))
    _add_chaos(
        commands.add_parser("check", help="prove over a run's directory that nothing was lost or trained on twice"),
        commands.add_parser("chaos", help="train while processes are killed and files damaged, then check"),
    )
    _add_simulate(
        commands.add_parser("simulate", help="size a cluster on a virtual clock: throughput, waits, the best split")
    )
    return parser


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings of the run, and of the costs: profile.KEY=VALUE"
    )
    parser.add_argument("--from", dest="from_run", type=Path, metavar="RUN", help="measure the costs in this directory")
    parser.add_argument("--profile", metavar="FILE", help="costs from a file, or one of those in configs/profile")
    parser.add_argument("--gpus", type=int, metavar="N", help="split so many between engines and trainer")
    parser.add_argument("--trainer-gpus", type=int, metavar="N", help="this split only")
    parser.add_argument("--steps", type=int, metavar="N", help="to simulate, after the warm-up")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the costs, to be edited and given to --profile"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write a picture of throughput against the split")


def _add_submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cluster", type=Path, metavar="CLUSTER.yaml", help="such as configs/cluster/local.yaml, filled in"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run, as in `asyncrl run`")
    parser.add_argument("--down", action="store_true", help="at its end fetch the run to runs/NAME and `ray down`")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--resume", metavar="NAME", help="instead continue a run of this cluster")
    instead.add_argument("--follow", metavar="NAME", help="instead follow the log of one that was submitted before")
    instead.add_argument("--stop", metavar="NAME", help="instead interrupt one")


def _add_chaos(check: argparse.ArgumentParser, chaos: argparse.ArgumentParser) -> None:
    check.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    chaos.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run, as in `asyncrl run`")
    chaos.add_argument("--seed", type=int, default=0, metavar="N", help="which faults, on whom and when (0)")
    kinds = "any of kill, stop, segv, disk, torn, flip, reply, slow_reward, nan_reward (kill,stop,segv)"
    chaos.add_argument("--faults", default="kill,stop,segv", metavar="KIND,...", help=kinds)
    chaos.add_argument("--rounds", type=int, default=5, metavar="K", help="how many faults (5)")
    chaos.add_argument("--at-least", type=float, metavar="SCORE", help="held-out score that it must still reach")


def _add_drafter(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    command = actions.add_parser("train", help="learn a head from the recorded answers, for the newest policy")
    command.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    command.add_argument("--kind", choices=("eagle3", "eagle"), help="the run's own, or eagle3")
    command.add_argument("--steps", type=int, default=400, metavar="N", help="updates of the head (400)")
    command.add_argument("--checkpoint", type=Path, metavar="DIR", help="another model to draft for")
    command.add_argument("--out", type=Path, metavar="DIR", help="where it is written (RUN/drafter)")
    command = actions.add_parser("export", help="write the run's head as a directory that vLLM loads")
    command.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    command.add_argument("--out", type=Path, metavar="DIR", required=True, help="a new directory")
