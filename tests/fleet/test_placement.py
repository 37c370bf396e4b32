"""Who takes what of a cluster, and the sentences about what is missing."""

import asyncio
from typing import Any

import pytest

from asyncrl.config import Run, load
from asyncrl.errors import ConfigError
from asyncrl.fleet.placement import Offer, arriving, demands, missing, spans_machines
from pipelines.fleet.cluster_offer import from_file, here, in_time, settled

CARDS = Offer(nodes=({"CPU": 16, "GPU": 2}, {"CPU": 16, "GPU": 2}))
SLOTS = Offer(nodes=({"CPU": 8, "trainer_slot": 1}, {"CPU": 8, "rollout_slot": 4}))
VLLM: dict[str, Any] = {"type": "vllm", "tensor_parallel": 2}


def bundles(run: Run, offer: Offer) -> dict[str, dict[str, float]]:
    return {role: dict(demand.bundle) for role, demand in demands(run, offer).items()}


def said(raw: dict[str, Any], offer: Offer) -> list[str]:
    return list(missing(list(demands(load(raw), offer).values()), offer))


def test_on_one_machine_nothing_is_counted_but_cores() -> None:
    run = load({"rollout": {"replicas": 3}})
    expected = {"buffer": {}, "reward": {}, "trainer": {"CPU": 1.0}, "rollout": {"CPU": 1.0}}
    assert bundles(run, Offer(nodes=({"CPU": 4, "GPU": 1},), attached=False)) == expected
    assert demands(run, here(run))["rollout"].processes == 3
    assert not list(missing(list(demands(run, here(run)).values()), here(run)))


def test_on_a_cluster_with_several_gpus_everybody_has_its_own() -> None:
    found = bundles(load({"engine": VLLM, "rollout": {"replicas": 1}}), CARDS)
    assert found["rollout"] == {"CPU": 1.0, "GPU": 2.0}, "as many as engine.tensor_parallel"
    assert found["trainer"] == {"CPU": 1.0, "GPU": 1.0}
    assert "GPU" not in bundles(load({"engine": {"type": "native"}, "trainer": {"device": "cpu"}}), CARDS)["trainer"]
    shared = Offer(nodes=({"CPU": 16, "GPU": 1},))
    assert "GPU" not in bundles(load({"engine": {"type": "vllm"}}), shared)["rollout"], "one card is shared"


def test_ranks_that_may_share_ask_for_a_part_of_a_gpu() -> None:
    def asked(ranks: int, offer: Offer = CARDS, **settings: Any) -> float:
        placement = {"share_gpu": True, **settings}
        run = load({"trainer": {"ranks": ranks}, "placement": placement, "engine": {"type": "vllm"}})
        return bundles(run, offer)["trainer"].get("GPU", 0.0)

    # An engine has one of the four cards.
    assert [asked(ranks) for ranks in (2, 3, 4, 6, 7, 9, 10)] == [1.0, 1.0, 0.5, 0.5, 0.3333, 0.3333, 0.25]
    assert asked(4, share_gpu=False) == 1.0
    assert asked(4, trainer={"gpus": 0.2}) == 0.2
    assert asked(4, Offer(nodes=({"CPU": 16, "GPU": 1},))) == 0.0, "one card is shared by all"
    raw: dict[str, Any] = {"trainer": {"ranks": 8}, "engine": {"type": "vllm"}}
    assert said(raw, CARDS)
    assert not said({**raw, "placement": {"share_gpu": True}}, CARDS)


def test_slots_are_asked_for_where_the_cluster_declares_them_or_the_config_does() -> None:
    assert bundles(load({}), SLOTS)["rollout"] == {"CPU": 1.0, "rollout_slot": 1.0}
    assert bundles(load({}), SLOTS)["trainer"] == {"CPU": 1.0, "trainer_slot": 1.0}
    assert bundles(load({}), CARDS._replace(could_have={"rollout_slot": 2.0}))["rollout"]["rollout_slot"] == 1.0
    asked = load({"placement": {"rollout": {"cpus": 2, "gpus": 0.5, "resources": {"rollout_slot": 1}}}})
    assert bundles(asked, CARDS)["rollout"] == {"CPU": 2.0, "GPU": 0.5, "rollout_slot": 1.0}


@pytest.mark.parametrize(
    ("raw", "offer", "words"),
    [
        ({"engine": VLLM, "rollout": {"replicas": 1}}, CARDS, []),
        (
            {"engine": VLLM, "rollout": {"replicas": 2}},
            CARDS,
            ["needs 5 GPUs (1 for trainer and 4 for rollout); the cluster has 4: use rollout.replicas=1, or"],
        ),
        (
            {"engine": {"type": "vllm", "tensor_parallel": 3}},
            CARDS,
            ["a rollout process needs 1 CPU, 3 GPU of one machine, and none of the cluster's 2 has that; lower"],
        ),
        (
            {"placement": {"rollout": {"resources": {"spot": 1}}}},
            CARDS,
            ["needs 1 spot (1 for rollout); the cluster has 0: lower placement.rollout.resources.spot"],
        ),
        ({"rollout": {"replicas": 6}}, SLOTS, ["needs 6 rollout_slot (6 for rollout); the cluster has 4: use rollout"]),
        (
            {"rollout": {"replicas": 6}},
            SLOTS._replace(could_have={"rollout_slot": 5, "CPU": 64}),
            ["the cluster has 4, and its autoscaler may bring it to 5: use rollout.replicas=5, or add machines"],
        ),
        ({"rollout": {"replicas": 6}}, SLOTS._replace(could_have={"rollout_slot": 8, "CPU": 64}), []),
    ],
)
def test_what_is_missing_is_said_with_the_way_out(raw: dict[str, Any], offer: Offer, words: list[str]) -> None:
    found = said(raw, offer)
    assert len(found) == len(words)
    assert all(expected in text for expected, text in zip(words, found, strict=True)), found


def test_what_an_autoscaler_has_to_bring() -> None:
    offer = SLOTS._replace(could_have={"rollout_slot": 8, "CPU": 64})
    assert arriving(demands(load({"rollout": {"replicas": 6}}), offer).values(), offer) == {"rollout_slot": 2.0}


def test_between_machines_weights_travel_by_file_unless_the_run_says_how() -> None:
    assert not spans_machines(Offer(nodes=({},)))
    assert settled(load({}), CARDS).weights.transport == "file"
    assert settled(load({}), Offer(nodes=({"CPU": 4},))).weights.transport == "auto"
    one_machine = Offer(nodes=({"CPU": 16, "GPU": 4},))
    assert settled(load({"engine": {"type": "vllm"}}), one_machine).weights.transport == "shared_memory", "other cards"
    asked = load({"weights": {"transport": "shared_memory"}})
    assert settled(asked, CARDS) is asked


def test_what_a_cluster_file_allows() -> None:
    config = {
        "max_workers": 3,
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 4, "trainer_slot": 1}, "max_workers": 0},
            "rollout": {"resources": {"CPU": 8, "rollout_slot": 2}, "max_workers": 5},
        },
    }
    assert from_file(config) == {"CPU": 28.0, "trainer_slot": 1.0, "rollout_slot": 6.0}


def test_a_cluster_that_does_not_bring_enough_in_time_is_named() -> None:
    async def place(wait_s: float) -> None:
        async with in_time(load({"placement": {"wait_s": wait_s}, "rollout": {"replicas": 6}}), SLOTS):
            await asyncio.sleep(0.05)

    asyncio.run(place(wait_s=60))
    with pytest.raises(ConfigError, match=r"did not bring 2 rollout_slot more within placement.wait_s=0.01 s"):
        asyncio.run(place(wait_s=0.01))
