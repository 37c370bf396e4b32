"""What settings are accepted, and what a refused one is told."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from asyncrl.config.algorithm import NO_CORRECTION
from asyncrl.config.errors import did_you_mean
from asyncrl.config.run import Run, WarmStart, load
from asyncrl.errors import ConfigError
from pipelines.compose import _without_hydras_own_warnings, compose


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(raw)
    return str(caught.value)


def structs(info: inspect.Type) -> Iterator[inspect.StructType]:
    for member in info.types if isinstance(info, inspect.UnionType) else (info,):
        if isinstance(member, inspect.StructType):
            yield member
            for field in member.fields:
                yield from structs(field.type)


def test_empty_config_is_the_default_run() -> None:
    assert load({}) == Run()


def test_round_trip() -> None:
    run = Run(name="x", seed=3, model=WarmStart(layers=2))
    assert load(msgspec.to_builtins(run)) == run


def test_every_struct_is_frozen_and_refuses_unknown_fields() -> None:
    for struct in structs(inspect.type_info(Run)):
        assert struct.forbid_unknown_fields, struct.cls
        assert struct.cls.__struct_config__.frozen, struct.cls


def test_derived_numbers() -> None:
    run = load({"max_staleness": 2, "flow": {"groups_per_step": 32}, "rollout": {"group_size": 8}})
    assert run.samples_per_step == 256
    assert run.capacity_groups == 96
    assert load({"max_staleness": 0}).capacity_groups == Run().flow.groups_per_step


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"trainr": {"lr": 1}}, "unknown key trainr: did you mean trainer?"),
        ({"trainer": {"lrr": 1}}, "unknown key trainer.lrr: did you mean trainer.lr?"),
        ({"lr": 1}, "unknown key lr: did you mean drafter.training.lr or model.lr or trainer.lr?"),
        ({"engine": {"type": "fake", "prefill_chunk": 8}}, "unknown key engine.prefill_chunk: known here: max_batch"),
        ({"max_staleness": -1}, "max_staleness=-1: expected `int` >= 0"),
        ({"trainer": {"lr": 0}}, "trainer.lr=0: expected `float` > 0.0"),
        ({"trainer": {"lr": float("nan")}}, "trainer.lr=nan: expected `float` > 0.0"),
        ({"seed": "one"}, "seed=one: expected `int`, got `str`"),
        ({"trainer": 5}, "trainer=5: expected `object`, got `int`"),
        ({"rollout": {"on_update": "drop"}}, "use one of keep, recompute"),
        (
            {"engine": {"type": "fak"}},
            "invalid value 'fak'; use one of native, vllm, transformers, fake",
        ),
        ({"engine": {"max_batch": 3}}, "engine.type is required"),
        ({"model": {"type": "checkpoint"}}, "model.path is required: give it as model.path=VALUE"),
        ({"name": 42}, "quote text that looks like a number: name='\"42\"'"),
        ({"name": "../x"}, "name='../x' must be a plain directory name"),
        ({"name": ""}, "name='' must be a plain directory name"),
        (
            {"rollout": {"temperature": 0}},
            "rollout.temperature=0 always takes the likeliest token: all samples of a group are the same, and nothing "
            "can be learned from them; set rollout.temperature=1",
        ),
        ({"rollout": {"top_k": 1}}, "rollout.top_k=1 always takes the likeliest token"),
        (
            {"rollout": {"group_size": 1}},
            "rollout.group_size=1 gives algorithm=grpo nothing to compare a sample with: every advantage is 0 and "
            "nothing is learned; set rollout.group_size=2 or more, or use algorithm=ppo or algorithm=reinforce_pp",
        ),
        ({"flow": {"groups_per_take": 9, "groups_per_step": 8}}, "lower flow.groups_per_take"),
        ({"flow": {"max_ready_groups": 3, "groups_per_take": 4}}, "the trainer would wait forever"),
        (
            {"engine": {"type": "vllm"}, "drafter": {"type": "eagle3", "training": {"source": "rollout"}}},
            "only engine=native gives hidden states as it decodes, and not engine=vllm; use "
            "drafter.training.source=trainer",
        ),
        (
            {"engine": {"type": "vllm"}, "drafter": {"type": "eagle", "training": {"source": "both"}}},
            "drafter.training.source=both: only engine=native",
        ),
        (
            {"engine": {"type": "transformers"}, "drafter": {"type": "ngram"}},
            "drafter=ngram: engine=transformers decodes without drafts; use drafter=none, or engine=native or vllm",
        ),
        (
            {"engine": {"type": "transformers"}, "rollout": {"precision": "fp8"}},
            "rollout.precision=fp8: engine=transformers computes in fp32 or bf16; use rollout.precision=bf16, or "
            "engine=native or vllm",
        ),
        ({"distill": {"reward": 1.0}}, "distill.* is set and teachers is empty: name one, such as teachers=[{path:"),
        ({"teachers": [{"weight": 2.0}]}, "teachers[0].path is required"),
        ({"teachers": [{"path": "t", "weight": 0}]}, "teachers[0].weight=0: expected `float` > 0.0"),
        (
            {"teachers": [{"path": "t"}], "engine": {"type": "fake"}},
            "teachers judge tokens of a model, and engine=fake has none; use engine=native or vllm",
        ),
        (
            {"teachers": [{"path": "t"}], "algorithm": {"type": "dapo"}},
            "algorithm.dynamic_sampling=true drops groups of equal rewards, from which teachers teach",
        ),
        (
            {"teachers": [{"path": "t"}], "algorithm": {"type": "ppo"}},
            "algorithm=ppo trains a critic of rewards, and with distill.reward=0 they teach nothing: use algorithm=",
        ),
        (
            {
                "teachers": [{"path": "t"}],
                "algorithm": {"type": "reinforce_pp", "kl": {"coefficient": 0.1, "placement": "reward"}},
            },
            "algorithm.kl.placement=reward takes the penalty from rewards, and with distill.reward=0 they teach",
        ),
        (
            {"teachers": [{"path": "t"}], "distill": {"reward": 0.5}, "rollout": {"group_size": 1}},
            "rollout.group_size=1 gives algorithm=grpo nothing to compare the reward of a sample with, and "
            "distill.reward=0.5 asks for that: set rollout.group_size=2 or more, or distill.reward=0",
        ),
        (
            {"teachers": [{"path": "t"}, {"path": "u"}], "distill": {"top_k": 8}},
            "distill.top_k=8 compares with the likeliest tokens of one teacher, and teachers names 2: keep one of "
            "them, or set distill.top_k=0",
        ),
        (
            {
                "teachers": [{"path": "t"}],
                "distill": {"top_k": 8, "reward": 1.0},
                "correction": {"type": "importance", "batch_normalize": True},
            },
            "correction.batch_normalize=true does not go with algorithm.entropy, algorithm.router_aux_loss, a KL "
            "penalty in the loss or distill.top_k",
        ),
        (
            {"teachers": [{"path": "t"}], "distill": {"divergence": "forward"}},
            "distill.divergence=forward needs tokens that the student may not have sampled: set distill.top_k",
        ),
    ],
)
def test_refusals_name_field_value_and_way_out(raw: dict[str, Any], said: str) -> None:
    assert said in refusal(raw)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"])
def test_a_lone_sample_is_refused_where_groups_are_compared(kind: str) -> None:
    assert f"rollout.group_size=1 gives algorithm={kind} " in refusal(
        {"algorithm": {"type": kind}, "rollout": {"group_size": 1}}
    )


@pytest.mark.parametrize("kind", ["ppo", "reinforce_pp"])
def test_other_algorithms_learn_from_a_lone_sample_but_not_from_the_likeliest_tokens(kind: str) -> None:
    assert load({"algorithm": {"type": kind}, "rollout": {"group_size": 1}}).rollout.group_size == 1
    assert "rollout.temperature=0 " in refusal({"algorithm": {"type": kind}, "rollout": {"temperature": 0}})


def test_a_baseline_of_the_group_needs_a_group() -> None:
    raw = {"algorithm": {"type": "reinforce_pp", "group_baseline": True}, "rollout": {"group_size": 1}}
    assert "rollout.group_size=1 gives algorithm=reinforce_pp " in refusal(raw)


@pytest.mark.parametrize(
    "raw", [{"engine": {"type": "fake"}}, {"algorithm": {"type": "custom", "function": "mine.py:loss"}}]
)
def test_nothing_of_that_is_refused_without_a_model_or_with_an_own_loss(raw: dict[str, Any]) -> None:
    assert load(raw | {"rollout": {"group_size": 1, "temperature": 0}}).rollout.group_size == 1


def test_a_recorded_run_is_read_although_it_could_not_learn() -> None:
    raw = {"rollout": {"group_size": 1, "temperature": 0}}
    assert load(raw, recorded=True).rollout.group_size == 1


def test_a_run_recorded_before_there_were_routes_goes_on_without() -> None:
    assert load({}).rollout.router_replay == "auto"
    assert load({"rollout": {"max_tokens": 9}}, recorded=True).rollout.router_replay == "off"
    assert load(msgspec.to_builtins(Run()), recorded=True) == Run()


CUDA = {"type": "native", "device": "cuda"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, {"trainer"}),
        ({"trainer": {"ranks": 2, "context_parallel": 2}}, {"rollout"}),
        ({"agent": {"function": "a.py:play"}}, {"trainer"}),
        ({"drafter": {"type": "eagle", "training": {"source": "trainer"}}}, {"trainer"}),
        ({"drafter": {"type": "eagle", "training": {"source": "rollout"}}, "engine": CUDA}, {"rollout"}),
        ({"drafter": {"type": "eagle", "training": {"source": "both"}}}, {"trainer", "rollout"}),
        ({"drafter": {"type": "eagle", "training": {"on": False}}}, set()),
        ({"drafter": {"type": "ngram"}}, set()),
    ],
)
def test_the_trainer_gives_hidden_states_unless_it_cuts_completions(raw: dict[str, Any], expected: set[str]) -> None:
    assert load({"drafter": {"type": "eagle"}} | raw).hidden_states_from == expected


def test_all_unknown_keys_are_told_at_once() -> None:
    assert refusal({"sed": 1, "trainer": {"l": 1, "lr": 1e-3}, "engine": {"type": "fake", "sigm": 1}}).splitlines() == [
        "unknown key sed: did you mean seed?",
        "unknown key trainer.l: did you mean trainer.lr?",
        "unknown key engine.sigm: did you mean engine.sigma?",
    ]


def test_did_you_mean_lists_all_when_nothing_is_near() -> None:
    assert did_you_mean("zebra", ["b", "a"]) == "known here: a, b"
    assert did_you_mean("fak", ["native", "fake"]) == "did you mean fake?"


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("path", list(leaves(msgspec.to_builtins(Run()))))
def test_a_wrong_type_anywhere_is_refused_with_its_path(path: str) -> None:
    tree: dict[str, Any] = msgspec.to_builtins(Run())
    *above, last = path.split(".")
    place = tree
    for key in above:
        place = place[key]
    wrong = "wrong" if isinstance(place[last], list | tuple) else ["wrong"]
    place[last] = wrong
    assert refusal(tree).startswith(f"{path}={wrong}: ")


def test_a_wrong_item_of_a_list_is_refused_with_its_place() -> None:
    rejections = [{"measure": "k3", "over": "mean", "high": 0.01}, {"measure": "k9", "over": "mean", "high": 1}]
    said = refusal({"correction": {"type": "importance", "reject": rejections}})
    assert said.startswith("correction.reject[1].measure=k9: invalid enum value")
    assert "use one of" in said


@pytest.mark.parametrize("module", ["hydra.core.utils", "pipelines.compose"])
def test_hydras_warnings_are_silent_unless_asked_for(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Hydra 1.3 causes some in omegaconf 2.4, and Hydra 1.4 warns whoever calls it."""
    with _without_hydras_own_warnings():
        warnings.warn_explicit("register_new_resolver() is deprecated", UserWarning, "utils.py", 215, module=module)
        warnings.warn_explicit("Implicit conversion from Version", FutureWarning, "loader.py", 291, module=module)
    monkeypatch.setenv("ASYNCRL_VERBOSE", "1")
    with _without_hydras_own_warnings(), pytest.warns(UserWarning, match="register_new_resolver"):
        warnings.warn_explicit("register_new_resolver() is deprecated", UserWarning, "utils.py", 215, module=module)


def test_a_pure_distillation_needs_no_group() -> None:
    taught = {"teachers": [{"path": "t"}], "rollout": {"group_size": 1}}
    run = load(taught | {"flow": {"incomplete": "train_rest", "incomplete_min": 1}})
    assert not run.learns_from_rewards
    assert load(taught | {"algorithm": {"type": "ppo"}, "distill": {"reward": 0.1}}).learns_from_rewards
    assert Run().learns_from_rewards


def test_a_divergence_alone_has_no_correction() -> None:
    taught = {"teachers": [{"path": "t"}]}
    alone, mixed = (load(taught | {"distill": {"top_k": 8, "reward": reward}}) for reward in (0.0, 0.5))
    assert alone.applied_correction == NO_CORRECTION == compose(["correction=none"]).correction
    assert mixed.applied_correction == mixed.correction == load(taught).applied_correction != NO_CORRECTION
