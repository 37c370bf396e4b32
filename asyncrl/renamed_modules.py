"""Old names of modules that users' files and started cluster jobs import; each is the module under its new name."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import CodeType, ModuleType

RENAMED = {
    "asyncrl.algorithms.settings": "asyncrl.config.algorithm",
    "asyncrl.engines.settings": "asyncrl.config.engine",
    "asyncrl.environments": "asyncrl.user_code",
    "asyncrl.environments.base": "asyncrl.user_code.environments",
    "asyncrl.insight": "asyncrl.observe",
    "asyncrl.insight.tables": "asyncrl.observe.query.tables",
    "asyncrl.rewards.base": "asyncrl.user_code.protocol",
    "asyncrl.rewards.pool": "asyncrl.user_code.pool",
    "asyncrl.rewards.score": "asyncrl.user_code.score",
    "asyncrl.stages": "asyncrl.user_code",
    "asyncrl.stages.base": "asyncrl.user_code.stages",
    "asyncrl.tasks.settings": "asyncrl.config.task",
    "asyncrl.tracking": "asyncrl.observe.trackers",
    "asyncrl.tracking.base": "asyncrl.observe.trackers.base",
    "pipelines.cluster_job": "pipelines.cluster.job",
    "pipelines.cluster_wait": "pipelines.cluster.wait",
}


class _Alias(InspectLoader):
    """Gives out the module that has another name now."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self._target)

    def exec_module(self, module: ModuleType) -> None:
        """It was executed under its own name."""

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m OLD.NAME`, which runs the code again as `__main__`."""
        spec = find_spec(self._target)
        return spec.loader.get_code(self._target) if spec and isinstance(spec.loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        return None


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, _Alias(RENAMED[fullname])) if fullname in RENAMED else None


def install() -> None:
    """Before Python's own finders: an alias of a package has that package's path, where they would look first."""
    sys.meta_path.insert(0, _Finder())
