"""What a harness over HTTP costs against an environment in the process, and what hundreds of episodes at a time take.

    python -m benchmarks.agents throughput [--steps 30] [override ...]
    python -m benchmarks.agents memory [--steps 40] [--episodes 512]

`throughput`: the same conversation of two turns with the quickstart's model or the overrides' one, three times: as an
environment function, as an async harness with a bare HTTP client, and with OpenAI's client. Rewards are equal, so that
no group is skipped in one and trained on in another. The aim is 10 % of the samples per second at most. Beside them
stands what each process spends on a sample: that hardly depends on who else is busy, and samples per second do.

`memory`: every episode waits for a second between its two turns, as for a tool. Printed is the resident memory of each
process of the run over quarters of the run; after the first it should be flat.
"""

import argparse
import asyncio
import hashlib
import json
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import psutil
from openai import AsyncOpenAI

from asyncrl.user_code.agents import Access
from benchmarks import runs

HERE = str(Path(__file__).resolve())
SAID = "="
"""What the second turn goes on from."""
TOOL_S = 1.0
PARTS = 4
LOOK_S = 1.0
BUSY = ("RolloutActor", "GatewayActor", "harness", "RewardActor", "TrainerActor", "BufferActor", "driver")
"""Processes whose CPU seconds are told, for each sample."""
HTTP = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None), timeout=600)
OPENAI = AsyncOpenAI(base_url="http://localhost", api_key="of its episode", timeout=600)


def environment(prompt: str, turns: list[str], answer: str) -> str | None:
    return SAID if len(turns) == 1 else None


def reward(prompt: str, completion: str, answer: str) -> float:
    """Differs within a group whatever the model says."""
    return hashlib.sha256(completion.encode()).digest()[0] / 255


async def bare(prompt: str, answer: str, access: Access) -> str | None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    said = await _post(access, messages)
    return (await _post(access, [*messages, said, {"role": "user", "content": SAID}]))["content"]


async def slow(prompt: str, answer: str, access: Access) -> str | None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    said = await _post(access, messages)
    await asyncio.sleep(TOOL_S)
    return (await _post(access, [*messages, said, {"role": "user", "content": SAID}]))["content"]


async def _post(access: Access, messages: list[dict[str, Any]]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {access.key}"}
    found = await HTTP.post(f"{access.url}/chat/completions", json={"messages": messages}, headers=headers)
    return found.json()["choices"][0]["message"]


async def official(prompt: str, answer: str, access: Access) -> str | None:
    create = OPENAI.with_options(base_url=access.url, api_key=access.key).chat.completions.create
    messages: list[Any] = [{"role": "user", "content": prompt}]
    said = (await create(model=access.model, messages=messages)).choices[0].message
    messages += [said.model_dump(exclude_none=True), {"role": "user", "content": SAID}]
    return (await create(model=access.model, messages=messages)).choices[0].message.content


class Look(NamedTuple):
    """At the processes of a run, by what they are."""

    time: float
    megabytes: dict[str, float]
    cpu_s: dict[str, float]


def throughput(steps: int, overrides: Sequence[str]) -> None:
    common = (f"steps={steps}", f"reward.function={HERE}:reward", "evaluation.prompts=0", "checkpoint.last=false")
    common += ("trainer.lr=1e-12",)  # else each way learns replies of another length
    ways = {
        "environment": ("environment.function=" + HERE + ":environment", "environment.max_turns=2"),
        "harness, bare HTTP": (f"agent.function={HERE}:bare",),
        "harness, OpenAI's client": (f"agent.function={HERE}:official",),
    }
    _row("", "samples/s", "of the environment's", "tokens/s", "trainer waits", *(f"{role}, CPU ms" for role in BUSY))
    _row(*["---"] * (5 + len(BUSY)))
    first, model = 0.0, tuple[str, ...]()
    for name, own in ways.items():
        directory, looks = _watched(*common, *own, *model, *overrides)
        if (directory / "model").exists():  # a warm start, which is made once
            model = ("model=checkpoint", f"model.path={directory / 'model'}")
        found = runs.steady(directory)
        first = first or found.samples_per_second
        _, *steady = _updates(directory)[runs.WARM_STEPS - 1 :]
        counted = [look for look in looks if look.time <= steady[-1]]
        begun = next(look for look in counted if look.time >= steady[0])
        samples = found.samples_per_second * (counted[-1].time - begun.time)
        spent = {role: counted[-1].cpu_s.get(role, 0.0) - begun.cpu_s.get(role, 0.0) for role in BUSY}
        _row(
            name,
            f"{found.samples_per_second:.1f}",
            f"{found.samples_per_second / first:.2f}",
            f"{found.tokens_per_second:.0f}",
            f"{found.trainer_wait:.0%}",
            *(f"{1000 * seconds / samples:.1f}" for seconds in spent.values()),
        )


def memory(steps: int, episodes: int) -> None:
    words = [f"steps={steps}", f"agent.function={HERE}:slow", f"agent.concurrency={episodes}"]
    words += [f"reward.function={HERE}:reward", "evaluation.prompts=0", "rollout.max_tokens=160"]
    # With a staleness of one, twice the groups of a step are under way.
    words += ["max_staleness=1", f"flow.groups_per_step={episodes // 16}", "rollout.group_size=8"]
    directory, looks = _watched(*words, f"engine.max_batch={episodes}")
    begun, *_, ended = _updates(directory)
    names = sorted({name for look in looks for name in look.megabytes})
    _row("quarter", *(f"{name}, MB" for name in names))
    _row(*["---:"] * (1 + len(names)))
    for part in range(PARTS):
        low, high = (begun + (ended - begun) * share / PARTS for share in (part, part + 1))
        inside = [look.megabytes for look in looks if low <= look.time < high]
        medians = [statistics.median(found.get(name, 0.0) for found in inside) for name in names]
        _row(str(part + 1), *(f"{median:.0f}" for median in medians))
    played = runs.steady(directory).samples_per_second
    print(f"{played:.1f} episodes a second, of {TOOL_S} s in tools each; up to {episodes} at a time")


def _watched(*overrides: str) -> tuple[Path, list[Look]]:
    """A run, and its processes at each second of it."""
    root, looks = Path(tempfile.mkdtemp(prefix="agents-")), list[Look]()
    words = ["experiment=quickstart", "cluster=local", f"root={root}", "name=run", *overrides]
    with (root / "output").open("wb") as output:
        process = subprocess.Popen([*runs.HERE, "run", *words], stdout=output, stderr=output)
        while process.poll() is None:
            with suppress(psutil.Error):
                looks.append(_look(psutil.Process(process.pid)))
            time.sleep(LOOK_S)
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}: {root / 'output'}")
    return root / "run", looks


def _updates(directory: Path) -> list[float]:
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [event["time"] for event in events if event["kind"] == "update"]


def _look(run: psutil.Process) -> Look:
    found = Look(time.time(), defaultdict(float), defaultdict(float))
    for process in (run, *run.children(recursive=True)):
        with suppress(psutil.Error):
            role, used = _role(process.cmdline()), process.cpu_times()
            found.megabytes[role] += process.memory_info().rss / 1e6
            found.cpu_s[role] += used.user + used.system
    return found


def _role(words: Sequence[str]) -> str:
    if words[0].startswith("ray::"):  # Ray's titles: ray::GatewayActor, while it is called ray::GatewayActor.play
        name = words[0].removeprefix("ray::").partition(".")[0].rpartition(":")[2]
        return name if name.endswith("Actor") else "Ray"
    modules = {"asyncrl.user_code.harness_worker": "harness", "asyncrl.user_code.worker": "reward function"}
    named = (role for module, role in modules.items() if module in words)
    return next(named, "driver" if runs.HERE[-1] in words else "Ray")


def _row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["throughput", "memory"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    if options.what == "throughput":
        throughput(options.steps or 30, options.overrides)
    else:
        memory(options.steps or 40, options.episodes)


if __name__ == "__main__":
    main()
