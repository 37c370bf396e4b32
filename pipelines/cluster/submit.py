"""`asyncrl submit`: a cluster file and overrides in; a run on that cluster, its log here, its exit code.

    check file and settings -> ray up -> wait for the nodes -> begin the run on the head -> follow its log
                                                                           [-> fetch its directory -> ray down]

The run belongs to the head node and goes on when the connection is lost.
"""

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config import Run
from asyncrl.errors import ClusterError, ConfigError
from pipelines.cluster.commands import Cluster, say
from pipelines.compose import compose

ASYNCRL = ".venv/bin/asyncrl"
FETCHED = Path("runs")


def submit(path: Path, overrides: Sequence[str], *, down: bool = False) -> int:
    """Train on the cluster that `path` describes; returns the run's exit code."""
    cluster = Cluster(path)
    settings = [*cluster.settings.overrides, *overrides, "cluster=auto"]
    run = _checked(cluster, settings, down=down)
    return _work(cluster, run, [ASYNCRL, "run", *settings], down=down)


def resume(path: Path, name: str, overrides: Sequence[str] = (), *, down: bool = False) -> int:
    """Continue a run of that cluster, with settings changed as `asyncrl resume` allows it."""
    cluster = Cluster(path)
    run = _checked(cluster, [*cluster.settings.overrides, f"name={name}", "cluster=auto"], down=down)
    return _work(cluster, run, [ASYNCRL, "resume", _directory(run), *overrides], down=down)


def follow(path: Path, name: str) -> int:
    """The log of a run that was submitted before, until it ends."""
    return _follow(Cluster(path), name)


def stop(path: Path, name: str) -> int:
    Cluster(path).on_head(f"{name} could not be stopped", "job", "stop", name)
    say(f"{name} is interrupted; continue it with: asyncrl submit {path} --resume {name}")
    return 0


def _checked(cluster: Cluster, settings: Sequence[str], *, down: bool) -> Run:
    """The settings as the head will read them, checked before a machine costs money."""
    run = compose(settings)
    if not Path(run.root).is_absolute():
        raise ConfigError(
            f"root={run.root} must be a directory that all nodes see under the same path: give root=/shared/runs, or "
            f"it in metadata.asyncrl.overrides of {cluster.path}"
        )
    if down and (FETCHED / run.name).exists():
        raise ConfigError(f"{FETCHED / run.name} exists already, where the run is fetched to: choose another name=...")
    return run


def _work(cluster: Cluster, run: Run, words: Sequence[str], *, down: bool) -> int:
    say(f"bringing up {cluster.path}: {cluster.nodes} nodes to begin with")
    cluster.up()
    cluster.on_head(f"{run.name} did not begin", "job", "start", run.name, *words)
    say(f"{run.name} runs on the head, in {_directory(run)}")
    code = _follow(cluster, run.name)
    if down:
        cluster.fetch(_directory(run), FETCHED / run.name)
        cluster.down()
        say(f"the cluster is down; the run is in {FETCHED / run.name}")
    return code


def _follow(cluster: Cluster, name: str) -> int:
    again = f"asyncrl submit {cluster.path} --follow {name}"
    try:
        code = cluster.follow(name)
    except KeyboardInterrupt:
        say(f"\n{name} goes on, and so does the cluster: {again}, or --stop {name}, or ray down {cluster.path}")
        raise
    if code is None:
        raise ClusterError(f"the connection to the head was lost; the run goes on: {again}")
    return code


def _directory(run: Run) -> str:
    return str(Path(run.root) / run.name)
