"""What the command line accepts."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import asyncrl

OVERRIDES = """\
settings are given as key=value, on top of configs/base.yaml:
  experiment=quickstart         a named run; the CPU demo
  name=my-run seed=1 steps=50   where it is written (runs/my-run), how it is drawn, how long
  engine=native|vllm|...        a choice with settings of its own: engine.max_batch=64
  max_staleness=0               synchronous; 2 lets generation run up to two versions ahead
  cluster=local|auto|ADDRESS    a Ray of its own, or one that is there; inprocess runs without
  model=checkpoint model.path=DIRECTORY reward.function=my_reward.py:reward trainer.lr=1e-6
`asyncrl plan --config` prints every setting with its value.
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Settings may stand behind options too, where argparse by itself has them only in one piece."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and ("overrides" not in options or any(word.startswith("-") or "=" not in word for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl", description=asyncrl.__doc__)
    parser.set_defaults(verbose=False)
    parser.add_argument("--version", action="version", version=f"asyncrl {asyncrl.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (("run", "train"), ("plan", "say what would run and what it needs; refuse what cannot work")):
        command = commands.add_parser(
            name, help=text, epilog=OVERRIDES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("overrides", nargs="*", metavar="key=value")
        _add_verbose(command)
    init = commands.add_parser("init", help="write a small project that runs: prompts, a reward, a model, a script")
    init.add_argument("directory", type=Path, metavar="DIR", help="a new directory")
    plan = commands.choices["plan"]
    plan.add_argument("--config", action="store_true", help="print every setting and nothing else")
    plan.add_argument("--from", dest="from_run", type=Path, metavar="RUN", help="bytes per second, at a run's costs")
    plan.add_argument("--profile", metavar="FILE", help="the same, at the costs of a file, as in `asyncrl simulate`")
    command = commands.add_parser("resume", help="continue a stopped or killed run")
    command.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    _add_verbose(command)
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="from here on other trainer.lr=, sentinel.*=, max_staleness="
    )
    command = commands.add_parser(
        "replay", help="train again from the recorded stream, without engines; the same settings give the same weights"
    )
    command.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="another algorithm=, correction=, trainer.*="
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="a new directory for model, metrics and summary")
    command.add_argument("--evaluate", action="store_true", help="evaluate the result on the run's held-out prompts")
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
    _add_looking(commands.add_parser)
    _add_simulate(
        commands.add_parser("simulate", help="size a cluster on a virtual clock: throughput, waits, the best split")
    )
    return parser


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose", action="store_true", help="also what Ray, torch, vLLM and other libraries say about themselves"
    )


def _add_looking(add: Callable[..., argparse.ArgumentParser]) -> None:
    """What shows a run, going on or ended."""
    texts = {
        "report": "one HTML file that shows a run, also while it goes on: what bounds it, curves, timeline, samples",
        "trace": "its timeline for Perfetto or chrome://tracing",
        "top": "watch it from another terminal",
        "query": "query its trajectories, metrics and events with SQL",
    }
    parsers = {name: add(name, help=text) for name, text in texts.items()}
    for parser in parsers.values():
        parser.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    for name, written in (("report", "report.html"), ("trace", "trace.json")):
        parsers[name].add_argument("--out", type=Path, metavar="FILE", help=f"where to (RUN/{written})")
    query = parsers["query"]
    query.add_argument("sql", nargs="?", metavar="SQL", help="or the name of a ready one; without: tables and names")
    query.add_argument("--format", choices=("table", "csv", "json"), default="table", help="of the result (table)")
    doctor = add("doctor", help="look at this machine: what is wrong, and the command that mends it")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of lines")
    doctor.add_argument("--clean", action="store_true", help="first end the processes that dead runs have left behind")
    doctor.add_argument("--model", type=Path, metavar="DIR", help="say as well how this model would be trained")


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
    command = actions.add_parser("train", help="learn a head from the recorded samples, for the newest policy")
    command.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    command.add_argument("--kind", choices=("eagle3", "eagle"), help="the run's own, or eagle3")
    command.add_argument("--steps", type=int, default=400, metavar="N", help="updates of the head (400)")
    command.add_argument("--checkpoint", type=Path, metavar="DIR", help="another model to draft for")
    command.add_argument("--out", type=Path, metavar="DIR", help="where it is written (RUN/drafter)")
    command = actions.add_parser("export", help="write the run's head as a directory that vLLM loads")
    command.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/my-run")
    command.add_argument("--out", type=Path, metavar="DIR", required=True, help="a new directory")
