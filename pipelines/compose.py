"""Command line and YAML -> Run. The only file that imports Hydra, for its override grammar and its defaults lists.

The YAML files hold only what differs from the structs, so every `key=value` is composed as one that may be new;
whether the key exists is decided by the structs in `asyncrl.config`. Hydra neither changes the directory nor
writes files nor touches logging here, and nothing is instantiated from YAML.
"""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import hydra
import msgspec
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from asyncrl.config import Run, load
from asyncrl.config.errors import did_you_mean
from asyncrl.engines.registry import engine_for
from asyncrl.errors import ConfigError
from asyncrl.system import quiet

CONFIGS = (Path(__file__).parent / "configs").resolve()
NO_GROUP = "cluster"
"""A plain setting although configs/cluster/ is there: the files in it are Ray's. Hydra would take it for a choice."""


def compose(overrides: Sequence[str]) -> Run:
    """The run that `configs/base.yaml` and `overrides` describe, checked."""
    normal = [_normal(override) for override in overrides]
    cluster = [override for override in normal if override.startswith(f"++{NO_GROUP}=")]
    try:
        with _without_hydras_own_warnings(), hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose("base", [override for override in normal if override not in cluster])
        raw = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is required: give it as {error.full_key}=VALUE") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot compose {' '.join(overrides)}: {_first_line(error)}") from None
    found = _with_engine(cast(dict[str, Any], raw))
    for override in cluster:
        found[NO_GROUP] = OverridesParser.create().parse_override(override).value()
    return load(found)


@contextmanager
def _without_hydras_own_warnings() -> Generator[None, None, None]:
    """Of omegaconf's parts that Hydra uses, and of Hydra's that we use: each release has others. Nothing else is called
    inside."""
    with warnings.catch_warnings():
        if not quiet.verbose():
            warnings.simplefilter("ignore")
        yield


def _with_engine(raw: dict[str, Any]) -> dict[str, Any]:
    """`engine=auto` becomes the engine that suits machine and model, and so stands in the run's config.yaml."""
    engine = raw.get("engine")
    if isinstance(engine, dict) and cast(dict[str, Any], engine).get("type") == "auto":
        raw["engine"] = engine_for(raw).settings
    return raw


def changed(run: Run, overrides: Sequence[str], *, allowed: Sequence[str]) -> Run:
    """A recorded run with other settings in the named parts of it; a choice such as correction=none begins from its
    defaults."""
    raw = msgspec.to_builtins(run)
    for text in overrides:
        override = OverridesParser.create().parse_override(text)
        part, _, field = override.key_or_group.partition(".")
        if part not in allowed and override.key_or_group not in allowed:
            raise ConfigError(f"{text} cannot be changed here; {', '.join(allowed)} can, and their fields")
        if field:
            _set(raw[part], field.split("."), override.value())
        else:
            fields = [other for other in overrides if other.startswith(f"{part}.")]  # some choices need theirs
            raw[part] = msgspec.to_builtins(getattr(compose([text, *fields]), part))
    return load(raw, recorded=not overrides)


def _set(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def to_yaml(run: Run) -> str:
    """Every setting of `run`; `from_yaml` gives the same run back."""
    return msgspec.yaml.encode(run).decode()


def from_yaml(path: Path) -> Run:
    """The run that a resolved `config.yaml` describes."""
    try:
        raw = msgspec.yaml.decode(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; is {path.parent} the directory of a run?") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no settings")
    return load(cast(dict[str, Any], raw), recorded=True)


def _normal(text: str) -> str:
    """`text` as Hydra must see it: a group's choice as it is, a value as one that may be new."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"cannot read {text!r}: {_first_line(error)}; write key=value, and quote a value with special characters: "
            "key='\"a=b\"'"
        ) from None
    key, value = override.key_or_group, override.value()
    if not key:
        raise ConfigError(f"cannot read {text!r}: write key=value")
    if override.is_delete():
        raise ConfigError(f"cannot delete with {text!r}: leave a setting out and it has its default")
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} names several values; start one run for each")
    if key.partition(".")[0] == "hydra":
        raise ConfigError(f"unknown key {key}: Hydra itself cannot be configured here")
    text = text.lstrip("+")
    if key == NO_GROUP or not (CONFIGS / key).is_dir() or isinstance(value, dict):
        return f"++{text}"
    choices = [path.stem for path in (CONFIGS / key).glob("*.yaml")]
    if value not in choices:
        raise ConfigError(f"{text} does not exist: {did_you_mean(str(value), choices)}")
    return text


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
