"""Who needs what of a cluster, and what of it is missing: arithmetic alone, without Ray.

Two custom resources name kinds of machines: `trainer_slot` for the trainer's ranks and `rollout_slot` for engines, one
for each process. They are asked for where the cluster declares them, so that a machine of the one kind is never taken
by the other; a cluster without them, such as a laptop, is used as it is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.config.placement import Role

if TYPE_CHECKING:
    from asyncrl.config import Run

TRAINER_SLOT, ROLLOUT_SLOT = "trainer_slot", "rollout_slot"
CPU, GPU = "CPU", "GPU"
ON_CARDS = ("rollout", "teacher")
"""Roles besides the trainer that compute on GPUs of a cluster."""
GRAIN = 10_000
"""Of one resource; Ray counts no finer."""
ROUNDING = 1e-9
HERE = ("local", "inprocess")
"""Values of `cluster` that stay on this machine."""


class Demand(NamedTuple):
    """Processes of one role, and what each of them takes."""

    role: str
    processes: int
    bundle: Mapping[str, float]

    @property
    def cpus(self) -> float:
        return self.bundle.get(CPU, 0.0)

    @property
    def gpus(self) -> float:
        return self.bundle.get(GPU, 0.0)

    @property
    def custom(self) -> dict[str, float]:
        return {name: amount for name, amount in self.bundle.items() if name not in (CPU, GPU)}


class Offer(NamedTuple):
    """What a cluster has."""

    nodes: tuple[Mapping[str, float], ...]
    """Everything that each node declares, used or not."""
    could_have: Mapping[str, float] | None = None
    """What its autoscaler may bring it to; none where nobody adds machines."""
    attached: bool = True
    """False for a Ray that the run starts for itself."""

    @property
    def total(self) -> dict[str, float]:
        return _added(self.nodes)

    @property
    def known(self) -> dict[str, float]:
        """Those of its resources that people count; Ray adds names of nodes and bytes of memory."""
        return {name: n for name, n in self.total.items() if ":" not in name and "memory" not in name}

    def declares(self, resource: str) -> bool:
        return resource in self.total or resource in (self.could_have or {})


def demands(run: "Run", offer: Offer, engines: int | None = None) -> dict[str, Demand]:
    """By role, in the order in which they are placed; `engines` is `rollout.replicas` unless said otherwise."""
    cards = max(offer.total.get(GPU, 0.0), (offer.could_have or {}).get(GPU, 0.0))
    own_cards = offer.attached and cards > 1
    drafter = run.drafter.head if run.drafter.trains else None
    counts = {
        "buffer": 1,
        "reward": 1,
        "gateway": int(run.agent.on),
        "drafter": int(drafter is not None),
        "teacher": len(run.teachers),
        "trainer": run.trainer.ranks,
        "rollout": (run.rollout.replicas if engines is None else engines) + run.evaluation.beside,
    }
    usual = {
        "trainer": {CPU: 1.0, GPU: float(own_cards and run.trainer.device != "cpu"), TRAINER_SLOT: 1.0},
        "rollout": {CPU: 1.0, GPU: _cards_per_engine(run, own_cards), ROLLOUT_SLOT: 1.0},
        "teacher": {CPU: 1.0, GPU: float(own_cards and any(each.device != "cpu" for each in run.teachers))},
        "drafter": {CPU: 0.0 if drafter is None or drafter.training.spot else 1.0},
    }
    roles: dict[str, Role] = {role: getattr(run.placement, role) for role in counts}
    if run.shares_gpu and own_cards:
        others = sum(counts[role] * _bundle(roles[role], usual[role], offer).get(GPU, 0.0) for role in ON_CARDS)
        usual["trainer"][GPU] = _part_of_card(run.trainer.ranks, cards - others)
    return {
        role: Demand(role, count, _bundle(roles[role], usual.get(role, {}), offer))
        for role, count in counts.items()
        if count
    }


def _part_of_card(ranks: int, cards: float) -> float:
    """The largest 1/k of a GPU that so many ranks find room with, in the steps that Ray counts in."""
    return floor(GRAIN / ceil(ranks / max(1, floor(cards)))) / GRAIN


def _cards_per_engine(run: "Run", own_cards: bool) -> float:
    """0 where it shares the machine's card with the others."""
    engine = run.engine
    return float(engine.gpus) if engine.may_use_gpu and (own_cards or engine.gpus > 1) else 0.0


def _bundle(role: Role, usual: Mapping[str, float], offer: Offer) -> dict[str, float]:
    slots = {name: amount for name, amount in usual.items() if name not in (CPU, GPU) and offer.declares(name)}
    cpus = usual.get(CPU, 0.0) if role.cpus == "auto" else role.cpus
    gpus = usual.get(GPU, 0.0) if role.gpus == "auto" else role.gpus
    wanted = {CPU: cpus, GPU: gpus, **slots, **role.resources}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def fitting(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many processes of this size are on such a machine, if it has no others."""
    return floor(min((node.get(name, 0.0) / amount for name, amount in bundle.items()), default=0.0) + ROUNDING)


def needed(wanted: Iterable[Demand]) -> dict[str, float]:
    """By resource, of everybody together."""
    return _added({name: each.processes * amount for name, amount in each.bundle.items()} for each in wanted)


def missing(wanted: Sequence[Demand], offer: Offer) -> Iterator[str]:
    """A sentence for each resource that is short, with the way out. Nothing of what others use is known here."""
    for demand in wanted:
        yield from _too_large(demand, offer)
    for name, amount in needed(wanted).items():
        if amount > offer.total.get(name, 0.0):
            yield from _short(name, amount, [each for each in wanted if name in each.bundle], offer)


def _too_large(demand: Demand, offer: Offer) -> Iterator[str]:
    """One process is on one machine."""
    if offer.could_have is not None:
        return  # machines of other kinds may come
    fits = any(all(node.get(name, 0.0) >= amount for name, amount in demand.bundle.items()) for node in offer.nodes)
    enough = all(offer.total.get(name, 0.0) >= amount for name, amount in demand.bundle.items())
    if enough and not fits:
        yield (
            f"a {demand.role} process needs {in_words(demand.bundle)} of one machine, and none of the cluster's "
            f"{len(offer.nodes)} has that; lower placement.{demand.role}, or add such a machine"
        )


def _short(name: str, amount: float, users: Sequence[Demand], offer: Offer) -> Iterator[str]:
    has, could = offer.total.get(name, 0.0), (offer.could_have or {}).get(name, 0.0)
    if could >= amount:
        return  # its autoscaler brings it
    of = " and ".join(f"{_number(each.bundle[name] * each.processes)} for {each.role}" for each in users)
    may = f", and its autoscaler may bring it to {_number(could)}" if offer.could_have is not None else ""
    what = {CPU: "CPUs", GPU: "GPUs"}.get(name, name)
    instead = _way_out(name, users, max(has, could))
    if offer.attached and offer.could_have is None:
        instead += "; if its autoscaler brings them, say how long to wait for it: placement.wait_s=600"
    yield f"needs {_number(amount)} {what} ({of}); the cluster has {_number(has)}{may}: {instead}"


def _way_out(name: str, users: Sequence[Demand], has: float) -> str:
    engines = next((each for each in users if each.role == "rollout"), None)
    if engines is not None:
        left = has - sum(each.bundle[name] * each.processes for each in users if each is not engines)
        if (fitting := floor(left / engines.bundle[name] + ROUNDING)) >= 1:
            return f"use rollout.replicas={fitting}, or add machines"
    field = {CPU: "cpus", GPU: "gpus"}.get(name, f"resources.{name}")
    return f"lower placement.{users[0].role}.{field}, or add machines"


def arriving(wanted: Iterable[Demand], offer: Offer) -> dict[str, float]:
    """What the autoscaler has to bring before everything runs."""
    short = {name: amount - offer.total.get(name, 0.0) for name, amount in needed(wanted).items()}
    return {name: amount for name, amount in short.items() if amount > 0}


def spans_machines(offer: Offer) -> bool:
    """Whether actors may be on different machines, now or later."""
    return offer.attached and (len(offer.nodes) > 1 or offer.could_have is not None)


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def in_words(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{_number(amount)} {name}" for name, amount in bundle.items())


def _number(amount: float) -> str:
    return f"{amount:g}"
