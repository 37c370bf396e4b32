"""Overrides, plan and the command line, as a user meets them."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from msgspec import inspect

from asyncrl.config import Checkpoint, Evaluation, Rollout, Run, WarmStart, load
from asyncrl.config.drafter import NoDrafter
from asyncrl.config.engine import FakeEngine, NativeEngine
from asyncrl.config.task import ChainsTask, JsonlTask
from asyncrl.errors import ConfigError
from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import Decoder
from pipelines.cli import main
from pipelines.compose import CONFIGS, changed, compose, from_yaml, to_yaml
from pipelines.plan import estimate
from pipelines.plan.estimate import model_config, needs
from pipelines.plan.plan import preflight, problems

UNIONS = {
    field.name: [member for member in field.type.types if isinstance(member, inspect.StructType)]
    for field in inspect.type_info(Run).fields
    if isinstance(field.type, inspect.UnionType)
}
REQUIRED = {
    "eagle": {"path": "head"},
    "eagle3": {"path": "head"},
    "checkpoint": {"path": "somewhere"},
    "jsonl": {"path": "somewhere"},
    "parquet": {"path": "somewhere"},
    "dataset": {"name": "somewhere"},
    "python": {"function": "package.module:function"},
    "code": {"path": "somewhere"},
    "reasoning_gym": {"dataset": "chain_sum"},
    "verifiers": {"environment": "somewhere"},
    "mix": {"sources": {"some": {"task": {"type": "chains"}}}},
    "custom": {"function": "package.module:function"},
}


def required(key: str, tag: str) -> list[str]:
    """As overrides."""
    return [f"{key}.{name}={written(value)}" for name, value in REQUIRED.get(tag, {}).items()]


def written(value: Any) -> str:
    """In Hydra's grammar."""
    if not isinstance(value, dict):
        return str(value)
    return "{" + ", ".join(f"{name}: {written(each)}" for name, each in cast(dict[str, Any], value).items()) + "}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return str(caught.value)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def literal(value: Any) -> str:
    """In the grammar of overrides, where keys have no quotes."""
    match value:
        case str():
            return f"'{value}'"
        case list() | tuple():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return "{" + ", ".join(f"{key}: {literal(below)}" for key, below in value.items()) + "}"
        case _:
            return json.dumps(value)


def beside(key: str, tag: str) -> list[str]:
    """What must be chosen with a member of a union: not every engine drafts, or has FP8."""
    if tag == "transformers":
        return ["rollout.precision=bf16"]
    return ["engine=vllm"] if key == "drafter" else []


# Composition.


def test_no_override_gives_the_struct_defaults() -> None:
    assert compose([]) == Run()


def test_every_field_can_be_set_without_a_plus() -> None:
    overrides = [f"{path}={literal(value)}" for path, value in leaves(msgspec.to_builtins(Run()))]
    assert len(overrides) > 50
    assert compose(overrides) == Run()


@pytest.mark.parametrize(
    ("key", "member"), [(key, member) for key, members in UNIONS.items() for member in members], ids=str
)
def test_every_union_member_has_its_file_and_its_fields(key: str, member: inspect.StructType) -> None:
    tag = str(member.tag)
    settings = msgspec.convert({"type": tag, **REQUIRED.get(tag, {})}, member.cls)
    fields = [f"{key}.{path}={literal(value)}" for path, value in leaves(msgspec.to_builtins(settings))]
    assert getattr(compose([*beside(key, tag), f"{key}={tag}", *fields]), key) == settings


CONTRACT = """
experiment=quickstart name=n seed=7 engine=fake algorithm=grpo correction=none max_staleness=0 drafter=none
rollout.precision=bf16 cluster=10.0.0.1:6379 steps=5 rollout.group_size=4 trainer.lr=1e-4
"""


def test_contract_overrides() -> None:
    run = compose(CONTRACT.split())
    assert (run.name, run.seed, run.max_staleness, run.drafter, run.steps) == ("n", 7, 0, NoDrafter(), 5)
    assert (run.rollout.precision, run.rollout.group_size, run.trainer.lr) == ("bf16", 4, 1e-4)
    assert (run.cluster, run.engine) == ("10.0.0.1:6379", FakeEngine())


def test_a_plus_is_tolerated() -> None:
    assert compose(["+seed=3", "++trainer.lr=0.5", "+engine=fake"]) == compose(
        ["seed=3", "trainer.lr=0.5", "engine=fake"]
    )


@pytest.mark.parametrize("experiment", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_compose_with_every_choice(experiment: Path) -> None:
    """An experiment sets a union's fields in a file of that group, so that another member can take its place."""
    base = [f"experiment={experiment.stem}"]
    compose(base)
    for key, members in UNIONS.items():
        for member in members:
            tag = str(member.tag)
            fields = required(key, tag)
            compose([*base, *beside(key, tag), f"{key}={tag}", *fields])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engin=fake"], "unknown key engin: did you mean engine?"),
        (["engine=fak"], "engine=fak does not exist: did you mean fake?"),
        (["experiment=quickstrt"], "experiment=quickstrt does not exist: did you mean quickstart?"),
        (["engine=fake", "engine.prefill_chunk=8"], "unknown key engine.prefill_chunk"),
        (["max_staleness=-1"], "max_staleness=-1: expected `int` >= 0"),
        (["model=checkpoint"], "model.path is required: give it as model.path=VALUE"),
        (["seed=1,2"], "'seed=1,2' names several values"),
        (["hydra.run.dir=x"], "unknown key hydra.run.dir"),
        (["~trainer"], "cannot delete"),
        (["seed"], "cannot read 'seed'"),
        (["=3"], "cannot read '=3'"),
        (["root=a=b"], "quote a value with special characters"),
        (["seed=${nowhere}"], "Interpolation key 'nowhere' not found"),
        (["rollout.precision=fp4"], "use one of bf16, fp32, fp8, fp8_full, fp8_kv"),
    ],
)
def test_bad_overrides_are_one_clear_error(overrides: list[str], said: str) -> None:
    assert said in refusal(*overrides)


def test_composing_leaves_no_trace(place: Path) -> None:
    compose(["experiment=quickstart"])
    assert (Path.cwd(), list(place.iterdir())) == (place, [])


def test_yaml_gives_the_same_run_back(place: Path) -> None:
    run = compose(["engine=fake", "engine.sigma=0.25", "trainer.lr=1e-7", "name='007'", "reward.timeout_s=0.5"])
    (place / "config.yaml").write_text(to_yaml(run))
    assert from_yaml(place / "config.yaml") == run


def test_a_recorded_run_that_could_not_learn_is_read_but_not_begun(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older versions did not refuse it."""
    run = Run(rollout=Rollout(group_size=1))
    (place / "config.yaml").write_text(to_yaml(run))
    recorded = from_yaml(place / "config.yaml")
    assert changed(recorded, [], allowed=()) == recorded == run
    assert changed(recorded, ["algorithm=reinforce_pp"], allowed=("algorithm",)).algorithm.kind == "reinforce_pp"
    with pytest.raises(ConfigError, match="every advantage is 0"):
        changed(recorded, ["trainer.lr=1e-4"], allowed=("trainer",))
    assert main(["plan", "rollout.group_size=1"]) == 2
    assert "rollout.group_size=1 gives algorithm=grpo nothing to compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sed: 1", "did you mean seed?"),
        ("a: [", "is not YAML"),
        ("", "holds no settings"),
        (None, "does not exist"),
    ],
)
def test_bad_yaml_is_refused(place: Path, text: str | None, said: str) -> None:
    if text is not None:
        (place / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        from_yaml(place / "config.yaml")


def test_every_config_file_goes_into_the_wheel() -> None:
    repository = Path(__file__).parents[2]
    settings = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {path for pattern in settings["pipelines"] for path in (repository / "pipelines").glob(pattern)}
    configs = repository / "pipelines" / "configs"
    assert configs.resolve() == (repository / "configs").resolve()
    assert {path.relative_to(configs) for path in shipped if path.name != "py.typed"} == {
        path.relative_to(CONFIGS) for path in CONFIGS.rglob("*") if path.is_file()
    }


# Preflight.


def test_quickstart_has_no_problem(place: Path) -> None:
    assert problems(compose(["experiment=quickstart"])) == []


def test_preflight_tells_all_problems(place: Path) -> None:
    (place / "runs" / "taken").mkdir(parents=True)
    (place / "reward.py").write_text("def other(prompt, completion, answer): return 0.0\n")
    run = compose(
        ["name=taken", "cluster=no where", "reward.function=reward.py:judge", "model=checkpoint", "model.path=nowhere"]
    )
    with pytest.raises(ConfigError) as caught:
        preflight(run)
    first, *rest = str(caught.value).split("\n  - ")
    assert first == "4 problems"
    for line, said in zip(
        rest, ["asyncrl resume runs/taken", "cluster=no where", "no function 'judge'", "no config.json"], strict=True
    ):
        assert said in line


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.max_length=100", "rollout.max_tokens=64"], "set engine.max_length=115"),  # 2 + 3 x 16 + 1, and 64
        (["model.heads=3", "model.kv_heads=2"], "must be a multiple"),
        (["task=jsonl", "task.path=x.jsonl"], "model=warm_start writes its examples for task=chains only"),
        (["buffer.max_bytes=1000"], "set buffer.max_bytes="),
        (["model.hidden_size=65536", "model.layers=200"], "needs about"),
        (["root=/dev/null"], "not a directory that can be written to"),
    ],
)
def test_impossible_runs_are_refused(place: Path, overrides: list[str], said: str) -> None:
    assert said in "\n".join(problems(compose(overrides)))


@pytest.mark.parametrize("address", ["local", "auto", "inprocess", "head:6379", "ray://10.0.0.1:10001", "[::1]:6379"])
def test_addresses(place: Path, address: str) -> None:
    assert problems(Run(cluster=address)) == []


# Estimates.

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_those_of_the_real_model(family: str, tied: bool, bias: bool) -> None:
    own = {"model_type": family, "tie_word_embeddings": tied, "attention_bias": bias, "mlp_bias": bias}
    raw = SHAPE | own | (EXPERTS if family == "qwen3_moe" else {})
    model = ModelConfig.from_hf(raw)
    assert estimate.parameters(model) == sum(p.numel() for p in Decoder(model, torch.float32).parameters())


def test_needs_by_hand() -> None:
    run = Run(model=WarmStart(), task=ChainsTask())
    model = ModelConfig.from_hf(SHAPE | {"model_type": "qwen2", "tie_word_embeddings": True})
    needs = estimate.needs(run, model, 44)  # and answers of 256
    # Embedding 50*24; per layer qkv 24*64 + 64, out 32*24, MLP 3*24*40, norms 48; last norm 24.
    assert needs.parameters == 1200 + 2 * (1536 + 64 + 768 + 2880 + 48) + 24
    assert needs.published == 4 * needs.parameters
    assert needs.optimizer == 16 * needs.parameters
    assert needs.kv_cache == 2 * 128 * 300 * (2 * 2 * 2 * 8 * 4)
    assert needs.trajectories == 256 * (300 * 12 + 2048)


def test_longest_prompt_of_a_file(place: Path) -> None:
    (place / "p.jsonl").write_text('{"prompt": "1"}\n{"prompt": "12345"}\n{"prompt": "123"}\n')
    run = Run(task=JsonlTask(path="p.jsonl", held_out=0), evaluation=Evaluation(prompts=0))
    assert estimate.longest_prompt(run) == 5


# The command.


def asyncrl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("asyncrl"), *arguments]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_installed_command_plans_from_an_empty_directory(tmp_path: Path) -> None:
    result = asyncrl("plan", "experiment=quickstart", "name=q", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for said in (
        "x 8 = 256 samples",
        "at most 2 versions old",
        "rollout (native)",
        "asyncrl run experiment=quickstart",
    ):
        assert said in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_plan_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = "import sys; from pipelines.cli import main; main(['plan']); print({'torch', 'ray'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.endswith("set()\n"), result.stderr


def test_refusal_is_one_line_and_code_two(tmp_path: Path) -> None:
    for command in ("run", "plan"):
        result = asyncrl(command, "trainer.lrr=1", cwd=tmp_path)
        assert result.returncode == 2
        assert result.stderr == "asyncrl: unknown key trainer.lrr: did you mean trainer.lr?\n"


def test_plan_shows_what_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "engine.max_length=10"]) == 2
    shown = capsys.readouterr()
    assert "1 step =" in shown.out
    assert "set engine.max_length=" in shown.err


def test_plan_config_prints_every_setting(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "seed=5"]) == 0
    assert load(msgspec.yaml.decode(capsys.readouterr().out)) == Run(seed=5)


def test_resume_of_nothing_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "runs/none"]) == 2
    assert "runs/none is not a run directory" in capsys.readouterr().err


def test_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.cli.app._run", interrupted)
    assert main(["run"]) == 130


def test_model_paths_may_start_at_home(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text(json.dumps(SHAPE | {"model_type": "qwen3"}))
    run = Run(model=Checkpoint(path="~/model"), engine=NativeEngine())
    assert estimate.model_config(run).hidden_size == 24


def test_functions_of_the_users_own_are_loaded_before_anything_starts(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "algorithm=custom", "algorithm.function=nothing.py:loss", "task.max_size=4"]) == 2
    assert "algorithm.function=nothing.py:loss cannot be used (FileNotFoundError" in capsys.readouterr().err
    example = Path(__file__).parents[2] / "examples" / "own_loss.py"
    own = [f"algorithm.function={example}:loss", "correction=custom", f"correction.function={example}:weights"]
    assert main(["plan", "algorithm=custom", *own]) == 0


def test_a_critic_and_a_reference_need_their_memory() -> None:
    plain, critic, reference = (
        needs(run, model_config(run), 100)
        for run in (compose([]), compose(["algorithm=ppo"]), compose(["algorithm.kl.coefficient=0.1"]))
    )
    head = model_config(compose([])).hidden_size
    assert critic.optimizer == 2 * plain.optimizer + 16 * head
    assert critic.checkpoint == 2 * plain.checkpoint + 12 * head
    assert reference.optimizer == plain.optimizer + 4 * plain.parameters
