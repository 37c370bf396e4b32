"""From a snapshot of the run to one sentence: follow who waits for whom until somebody does not wait, and name them."""

from asyncrl.drop_reasons import DropReason, describe, main_cause
from asyncrl.observe.diagnosis.snapshot import ActorView, Call, Doing, Explanation, SampleAt, Situation, Snapshot
from asyncrl.types import BufferStatus

STARTING = {"spawn": "be placed and started", "start": "start", "restore": "load its checkpoint"}
TRAINING = {"accumulate": "do a forward and backward", "step": "take a step", "save": "save a checkpoint"}
WAITED_FOR = ("evaluate", "take", "export_weights", "load_weights")
"""Further calls that hold up the pipeline, the most telling first."""
BESIDE = frozenset(
    ("generate", "play", "fetch", "admit", "offer", "status", "follow", "collect", "load_drafter", "note", "failures")
)
"""Calls that are always in progress, or that nobody waits for."""
OF_THE_REWARD = (DropReason.REWARD_ERROR, DropReason.REWARD_TIMEOUT, DropReason.REWARD_INVALID)
OF_THE_JUDGE = (
    DropReason.JUDGE_ERROR, DropReason.JUDGE_TIMEOUT, DropReason.JUDGE_INVALID, DropReason.JUDGE_BUDGET,
)  # fmt: skip


def explain(snapshot: Snapshot) -> Explanation:
    return _Trail(snapshot).explain()


class _Trail:
    """One walk along the waits. `head` begins the sentence, each link goes one step on."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._picture = snapshot
        self._head = "the run waits"
        self._links: list[str] = []
        self._suspects: list[str] = []

    def explain(self) -> Explanation:
        self._walk()
        sentence = f"{self._head}: {', '.join(self._links)}"
        before = f"no progress for {self._picture.idle_s:.0f} s, the last was {self._picture.last_progress}"
        faulty = [view.name for view in self._picture.actors.values() if view.health != "answers"]
        suspects = dict.fromkeys([*reversed(self._suspects), *faulty])
        return Explanation(sentence, (before, self._head, *self._links), tuple(suspects))

    # -- where the pipeline stands -------------------------------------------------------------------------------

    def _walk(self) -> None:
        calls = [call for call in self._picture.calls if call.method not in BESIDE]
        if not calls:
            return self._driver()
        call = min(calls, key=_rank)
        match call.method:
            case "spawn" | "start" | "restore":
                self._head = f"the run waits for {call.actor} to {STARTING[call.method]}"
                self._actor(call.actor, otherwise=f"that has taken {call.seconds:.0f} s (is there a free core for it?)")
            case "accumulate" | "step" | "save" if _trains(call):
                self._head = f"the run waits for the trainer to {TRAINING[call.method]}"
                ranks = [other.actor for other in calls if _trains(other)]
                name = next((rank for rank in ranks if self._faulty(rank)), "trainer")
                pronoun = "it" if name == "trainer" else f"its rank {name}"
                self._actor(name, otherwise=f"it has taken {call.seconds:.0f} s so far", pronoun=pronoun)
                self._backlog()
            case "evaluate":
                self._head = "the evaluation waits for completions"
                self._rollout(call)
            case "take":
                self._take()
            case "export_weights" | "load_weights":
                self._head = "the run waits for a publication"
                self._publication()
            case _:
                self._head = f"the run waits for {call.actor}.{call.method}"
                self._actor(call.actor, otherwise=f"it has taken {call.seconds:.0f} s so far", pronoun=call.actor)

    def _driver(self) -> None:
        self._head = "the run waits for no actor"
        stuck = "its own event loop is blocked" if self._picture.driver_blocked else "its own event loop is idle"
        self._links.append(f"{stuck}, the main thread is in {self._picture.driver_at or 'an unknown place'}")

    def _backlog(self) -> None:
        """What a trainer that hangs leads to."""
        status = self._status()
        if status is not None and status.complete:
            refused = f" and no new one is admitted ({status.refusal})" if status.refusal else ""
            self._links.append(f"meanwhile {status.complete} complete groups wait in the buffer{refused}")

    # -- the trainer waits for groups ----------------------------------------------------------------------------

    def _take(self) -> None:
        self._head = "trainer waits for its next groups"
        if self._faulty("buffer"):
            return self._actor("buffer", pronoun="the buffer")
        status = self._status()
        if status is None:
            self._links.append("the buffer has not reported yet")
        elif status.oldest_group is None:
            self._no_group(status.refusal)
        else:
            missing = self._unparked(status.oldest_group, status.missing)
            at = self._sample(status.oldest_group, missing)
            if self._picture.dropped and not self._stuck(at):
                return self._dropped()
            self._head = f"trainer waits for group {status.oldest_group}"
            self._missing(status.oldest_group, missing, at)

    def _stuck(self, at: SampleAt | None) -> bool:
        """Whether this sample is why nothing happens, and not what happens to all of them."""
        if any(self._faulty(name) for name in self._picture.actors):
            return True
        long = self._picture.idle_s / 2
        if at is None or at.seconds < long:
            return False
        said = self._said("reward")
        return at.stage != "reward" or said is None or not said.judging or said.judging[0].seconds >= long

    def _no_group(self, refusal: str) -> None:
        if self._picture.dropped:
            return self._dropped()
        self._links.append(f"none is being generated and none is admitted ({refusal or 'no ticket was requested'})")
        if "not published" in refusal:
            self._publication()

    def _dropped(self) -> None:
        """Work is done all the time, and thrown away all the time."""
        dropped = self._picture.dropped
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items(), key=lambda item: -item[1]))
        self._links.append(f"{sum(dropped.values())} samples were dropped since the last progress ({reasons})")
        if cause := main_cause(dropped):
            said = self._said("reward")
            first = f": {said.failures[cause]}" if said is not None and cause in said.failures else ""
            self._links.append(f"{cause} means that {describe(cause).meaning}{first}")
        if any(reason in dropped for reason in OF_THE_REWARD):
            self._links.append(f"so look at the reward function {self._picture.reward_function}")
            self._suspects.append("reward")
        if any(reason in dropped for reason in OF_THE_JUDGE):
            self._links.append(f"so look at the judge {self._picture.judge}")

    def _unparked(self, group: int, missing: tuple[int, ...]) -> tuple[int, ...]:
        """Those that others wait for to be compared with; all, if no other is missing."""
        said = self._said("reward")
        parked = {at.sample for at in said.samples if at.group == group} if said is not None else set[int]()
        return tuple(sample for sample in missing if sample not in parked) or missing

    def _missing(self, group: int, missing: tuple[int, ...], at: SampleAt | None) -> None:
        sample = at.sample if at else missing[0]
        if at is not None and at.stage == "compare":
            return self._stage("reward", at)
        name = self._sent_to(group, sample)
        if name is None:
            ended = self._picture.ended.get(group)
            fate = f"sent to {ended}, which says that it is done: it was lost" if ended else "sent to no engine"
            self._links.append(f"sample {sample} was {fate}")
            return self._deadline()
        if self._faulty(name) or at is None:
            self._links.append(f"sample {sample} is on {name}")
            self._actor(name)
            if not self._faulty(name):
                self._lost(name)
        else:
            self._stage(name, at)

    def _lost(self, name: str) -> None:
        said = self._said(name)
        if said is not None and said.num_samples <= len(said.samples):
            self._links[-1] = f"which answers but does not know it any more: it was lost{self._last(name)}"
            self._deadline()
        else:
            self._links[-1] = f"which holds {said.num_samples if said else 0} samples and answers{self._last(name)}"

    def _deadline(self) -> None:
        self._links.append(f"its group ends flow.group_timeout_s={self._picture.group_timeout_s:g} s after admission")

    def _stage(self, name: str, at: SampleAt) -> None:
        match at.stage:
            case "generate":
                self._links.append(f"sample {at.sample} has been in generation on {name} for {at.seconds:.0f} s")
                self._engine(name)
            case "verdict":
                self._links.append(f"sample {at.sample} of {name} is held until a new version is loaded and checked")
                self._publication()
            case "environment":
                self._links.append(f"sample {at.sample} of {name} has waited {at.seconds:.0f} s for its environment")
                self._actor("reward", pronoun="the reward actor")
            case "agent":
                self._links.append(f"sample {at.sample} of {name} has waited {at.seconds:.0f} s for its harness")
                self._harness()
            case "reward":
                self._links.append(f"sample {at.sample} of {name} has waited {at.seconds:.0f} s for its reward")
                self._reward()
            case "teacher":
                self._links.append(f"sample {at.sample} of {name} has waited {at.seconds:.0f} s for its teachers")
                self._teacher()
            case "compare":
                waited = f"sample {at.sample} has waited {at.seconds:.0f} s to be compared with others of its group"
                self._links.append(waited)
                self._reward()
            case "append":
                self._links.append(f"sample {at.sample} of {name} has been on its way into the buffer")
                self._actor("buffer", otherwise=f"for {at.seconds:.0f} s", pronoun="the buffer")

    # -- the others ----------------------------------------------------------------------------------------------

    def _publication(self) -> None:
        calls = [call for call in self._picture.calls if call.method in ("load_weights", "export_weights")]
        if not calls:
            self._links.append("and none is under way")
            return
        call = next((call for call in calls if self._faulty(call.actor)), calls[0])
        what = "exported its version" if call.method == "export_weights" else "acknowledged the new version"
        self._links.append(f"{call.actor} has not {what} for {call.seconds:.0f} s")
        self._actor(call.actor, pronoun="it")

    def _rollout(self, call: Call) -> None:
        calls = [other for other in self._picture.calls if other.method == "evaluate"]
        call = next((other for other in calls if self._faulty(other.actor)), call)
        self._links.append(f"{call.actor} has worked on held-out prompts for {call.seconds:.0f} s")
        said = self._said(call.actor)
        doing = [doing for doing in said.doing if doing.on] if said else []
        if self._faulty(call.actor) or not doing:
            self._actor(call.actor, pronoun="it")
            if not self._faulty(call.actor):
                self._links.pop()
                plays = said is not None and not said.running and self._said("gateway") is not None
                self._harness() if plays else self._engine(call.actor)
        else:
            self._links.append(f"it waits for {doing[0].what}")
            self._reward()

    def _engine(self, name: str) -> None:
        self._suspects.append(name)
        said = self._said(name)
        if said is not None:
            load = f"{said.running} running, {said.waiting} waiting"
            still = self._picture.actors[name].still_s
            self._links.append(f"its engine ({load}) made its last step {still:.0f} s ago{self._last(name)}")

    def _reward(self) -> None:
        said = self._said("reward")
        if self._faulty("reward") or said is None or not (said.judging or said.judge):
            return self._actor("reward", pronoun="the reward actor")
        self._suspects.append("reward")
        if said.judge:
            self._links.append(said.judge)
        if not said.judging:
            return
        oldest = said.judging[0]
        doing = "has been stopped (SIGSTOP)" if oldest.stopped else "has been at one sample"
        self._links.append(
            f"the reward function {self._picture.reward_function} (process {oldest.pid}) {doing} for "
            f"{oldest.seconds:.0f} s of the {oldest.limit_s:g} s that it may take"
        )

    def _teacher(self) -> None:
        """The one that is faulty, or has been at work the longest."""
        names = [name for name in self._picture.actors if name.startswith("teacher-")]
        found = [(self._faulty(name), doing.seconds, name) for name in names for doing in self._at_work(name)]
        found += [(True, 0.0, name) for name in names if self._faulty(name)]
        if not found:
            return self._links.append("and none of them is at work")
        name = max(found)[2]
        self._actor(name, pronoun=name)

    def _harness(self) -> None:
        said = self._said("gateway")
        if self._faulty("gateway") or said is None or not said.judging:
            return self._actor("gateway", pronoun="the gateway")
        self._suspects.append("gateway")
        oldest = said.judging[0]
        doing = "has been stopped (SIGSTOP)" if oldest.stopped else "has been at one episode"
        self._links.append(
            f"the agent {self._picture.harness} (process {oldest.pid}) {doing} for {oldest.seconds:.0f} s of the "
            f"{oldest.limit_s:g} s that it may take; {said.queued} episodes wait for a worker"
        )

    def _actor(self, name: str, *, otherwise: str = "", pronoun: str = "which") -> None:
        """Say what is wrong with an actor; if nothing is, what it does, or `otherwise`."""
        self._suspects.append(name)
        view = self._picture.actors.get(name)
        if view is None:
            self._links.append(otherwise or f"{pronoun} has not reported yet")
            return
        if view.health in ("dead", "stopped", "silent"):
            self._links.append(f"{pronoun} {_condition(view)}{self._last(name)}")
            return
        doing = view.said.doing[0] if view.said and view.said.doing else None
        if doing is not None and doing.on:
            self._links.append(f"{pronoun} has waited {doing.seconds:.0f} s for {doing.on} ({doing.what})")
            self._actor(doing.on)
        elif doing is not None:
            busy = " and takes nothing else meanwhile" if view.health == "busy" else ""
            self._links.append(f"{pronoun} has been at it for {doing.seconds:.0f} s ({doing.what}){busy}")
        elif view.health == "busy":
            self._links.append(f"{pronoun} computes and takes no call{self._last(name)}")
        else:
            self._links.append(otherwise or f"{pronoun} answers and does nothing{self._last(name)}")

    # -- lookups -------------------------------------------------------------------------------------------------

    def _faulty(self, name: str) -> bool:
        view = self._picture.actors.get(name)
        return view is not None and view.health in ("dead", "stopped", "silent")

    def _said(self, name: str) -> Situation | None:
        view = self._picture.actors.get(name)
        return view.said if view else None

    def _at_work(self, name: str) -> tuple[Doing, ...]:
        said = self._said(name)
        return said.doing if said else ()

    def _status(self) -> BufferStatus | None:
        said = self._said("buffer")
        return said.buffer if said else None

    def _last(self, name: str) -> str:
        view = self._picture.actors.get(name)
        if view is None or view.said is None:
            return ""
        return f", last event {view.said.last_event_s + view.silent_s:.0f} s ago: {view.said.last_event}"

    def _sent_to(self, group: int, sample: int) -> str | None:
        return next((call.actor for call in self._picture.calls if (group, sample) in call.slots), None)

    def _sample(self, group: int, missing: tuple[int, ...]) -> SampleAt | None:
        """The missing sample that has been longest where it is."""
        views = self._picture.actors.values()
        held = [at for view in views if view.said for at in view.said.samples if at.group == group]
        return max((at for at in held if at.sample in missing), key=lambda at: at.seconds, default=None)


def _rank(call: Call) -> tuple[int, float]:
    """What to explain first."""
    if call.method in STARTING:
        return 0, -call.seconds
    if _trains(call):
        return 1, -call.seconds
    if call.method in WAITED_FOR:
        return 2 + WAITED_FOR.index(call.method), -call.seconds
    return 9, -call.seconds


def _trains(call: Call) -> bool:
    """Of the trainer, or of one of its ranks: `trainer-1` and so on."""
    return call.method in TRAINING and call.actor.split("-")[0] == "trainer"


def _condition(view: ActorView) -> str:
    match view.health:
        case "dead":
            return "is dead"
        case "stopped":
            return f"is stopped (SIGSTOP) and has not answered for {view.silent_s:.0f} s"
        case _:
            process = f" (its process {view.process})" if view.process else ""
            return f"has not answered for {view.silent_s:.0f} s{process}"
