"""What reaches the gateway from outside: keys, paths, bodies, and how it ends."""

import asyncio
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from itertools import product

import httpx2 as httpx
import psutil
import pytest

from asyncrl.errors import EngineError, MissingDependencyError
from asyncrl.gateway import GatewayServer, SampledTokens, http
from asyncrl.types import Request, Sampling
from asyncrl.user_code.agents import Access
from tests.support.character_chat import CharacterChat
from tests.support.gateways import RunningGateway, Script, running_gateway, spoken

BODY = {"model": "p", "messages": [{"role": "user", "content": "go"}]}
BESIDE = ["/", "/docs", "/openapi.json", "/e", "/e/1-0", "/e/1-0/v1", "/e/1-0/v2/models", "//e/1-0/v1/models"]
PATHS = ["chat/completions", "responses", "messages", "messages/count_tokens", "models", "nothing"]


@pytest.fixture
def gateway() -> Iterator[RunningGateway]:
    with running_gateway() as gateway:
        yield gateway


def post(access: Access, path: str = "chat/completions", **options: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {access.key}"}
    return httpx.post(f"{access.url}/{path}", **{"headers": headers, "json": BODY, **options})  # type: ignore[arg-type]


def test_nothing_is_answered_without_the_key(gateway: RunningGateway) -> None:
    script = Script()
    access, other = gateway.open(script), gateway.open(script, "1-1")
    wrong = ({}, {"authorization": "Bearer"}, {"x-api-key": other.key}, {"authorization": f"Basic {access.key}"})
    with httpx.Client() as stranger:
        for method, path, headers in product(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"), PATHS, wrong):
            found = stranger.request(method, f"{access.url}/{path}", headers=headers)
            assert found.status_code == 401
            assert access.key not in found.text
    assert not script.requests


def test_nothing_is_beside_the_episodes(gateway: RunningGateway) -> None:
    access = gateway.open(Script())
    with httpx.Client(headers={"x-api-key": access.key}) as guest:
        found = [guest.get(gateway.server.url + path) for path in BESIDE]
    assert [each.status_code for each in found] == [401] * len(BESIDE)


@pytest.mark.timeout(60)
def test_a_path_costs_what_its_length_costs() -> None:
    """Anybody may send one, and nothing else is answered meanwhile. If it cost the square, this would take hours."""
    assert http.place("/e/1-0/v1/" + "/" * 5_000_000 + "x") == ("1-0", "/" * 5_000_000 + "x")


def test_slashes_at_the_end_of_a_path_do_not_count(gateway: RunningGateway) -> None:
    assert post(gateway.open(Script("yes")), "chat/completions//").status_code == 200
    assert http.place("/e/1-0/v1///") == ("", "")


def test_it_listens_on_the_loopback_interface_alone(gateway: RunningGateway) -> None:
    port = int(gateway.server.url.rpartition(":")[2])
    listening = [
        c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN" and c.laddr.port == port
    ]
    assert [address.ip for address in listening] == ["127.0.0.1"]


def test_a_body_has_a_limit(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY", 1000)
    access = gateway.open(Script("yes"))
    assert post(access).status_code == 200
    found = post(access, content=b"x" * 1001, json=None)
    assert (found.status_code, found.json()["error"]["code"]) == (413, "request_too_large")
    found = post(access, "messages", content=b"x" * 1001, json=None)
    assert (found.status_code, found.json()["error"]["type"]) == (413, "request_too_large")


def test_the_head_of_a_request_has_a_limit(gateway: RunningGateway) -> None:
    """It is read before there is a key to look at."""
    port = int(gateway.server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nendless: ")
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            stranger.sendall(b"a" * 30_000_000)
    assert post(gateway.open(Script("yes"))).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000, b"null"])
def test_a_body_that_is_no_call(gateway: RunningGateway, body: bytes) -> None:
    found = post(gateway.open(Script()), content=body, json=None)
    assert found.status_code == 400
    assert found.json()["error"]["message"]
    assert found.headers["x-should-retry"] == "false"


def test_what_an_engine_refuses_the_harness_is_told(gateway: RunningGateway) -> None:
    async def refuse(request: Request) -> SampledTokens:
        raise EngineError("the prompt has 9 tokens, and the engine takes 8")

    access = gateway.open(refuse)
    found = post(access)
    assert (found.status_code, found.json()["error"]["message"]) == (
        400,
        "the prompt has 9 tokens, and the engine takes 8",
    )


def test_a_failure_inside_is_one_of_the_call(gateway: RunningGateway, capfd: pytest.CaptureFixture[str]) -> None:
    calls = 0

    async def fail_once(request: Request) -> SampledTokens:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise LookupError("no engine")
        return spoken("yes", 10)

    access = gateway.open(fail_once)
    assert post(access).status_code == 500
    assert "LookupError: no engine" in capfd.readouterr().err
    assert post(access).status_code == 200


def test_calls_are_refused_while_the_run_ends(gateway: RunningGateway) -> None:
    script = Script()
    script.held = True
    access = gateway.open(script)
    answers = list[httpx.Response]()
    waiting = threading.Thread(target=lambda: answers.append(post(access)))
    waiting.start()
    assert script.begun.wait(10)
    gateway.server.closing = True
    found = post(access)
    assert (found.status_code, found.headers["x-should-retry"]) == (503, "false")
    gateway.do(gateway.server.close())
    waiting.join(10)
    assert [answer.status_code for answer in answers] == [503]
    with pytest.raises(httpx.ConnectError):
        post(access)
    gateway.do(gateway.server.close())


def test_seeds_and_ids_of_calls(gateway: RunningGateway) -> None:
    first, again = Script("a", "b"), Script("a", "b")
    for script in (first, again):
        access = gateway.open(script)
        for _ in range(2):
            assert post(access).status_code == 200
        gateway.do(gateway.server.end("1-0"))
    assert [(r.id, r.seed) for r in first.requests] == [(r.id, r.seed) for r in again.requests]
    assert [r.id for r in first.requests] == ["1-0/0", "1-0/1"]
    assert len({r.seed for r in first.requests}) == 2


def test_each_answer_can_have_a_reward_of_its_own(gateway: RunningGateway) -> None:
    """Also those that are empty because the tokens are used up: a harness does not know which these are."""

    async def four_tokens(request: Request) -> SampledTokens:
        return spoken("abcd", request.sampling.max_tokens)

    access = gateway.open(four_tokens, max_tokens=12)
    choices = [post(access, json={**BODY, "n": n}).json()["choices"] for n in (1, 1, 2, 3)]
    texts = [choice["message"]["content"] for reply in choices for choice in reply]
    turns = gateway.do(gateway.server.end("1-0")).trajectory([float(i) for i in range(len(texts))])[1].turns
    assert [turn.stop - turn.start for turn in turns] == [4, 4, 4]
    assert sorted(texts) == ["", "", "", "", "abcd", "abcd", "abcd"]
    assert [turn.reward for turn in turns] == [float(i) for i, text in enumerate(texts) if text]


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "a?b"])
def test_names_of_episodes_go_into_urls(gateway: RunningGateway, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a part of a URL"):
        gateway.open(Script(), name)


def test_an_episode_is_open_once(gateway: RunningGateway) -> None:
    gateway.open(Script())
    with pytest.raises(ValueError, match="is open already"):
        gateway.open(Script())


def test_signals_are_left_alone() -> None:
    async def serve() -> None:
        server = GatewayServer(CharacterChat())
        await server.start()
        await asyncio.sleep(0.05)
        assert signal.getsignal(signal.SIGTERM) is before
        await server.close()

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(serve())


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingDependencyError, match=r"asyncrl\[agents\]"):
        asyncio.run(GatewayServer(CharacterChat()).start())


def test_a_call_without_http() -> None:
    async def play() -> None:
        from asyncrl.gateway.call import Call

        server = GatewayServer(CharacterChat())
        await server.start()
        server.open("1-0", Script("yes"), Sampling(max_tokens=9), seed=1)
        answers = await server.episode("1-0").answer(Call(messages=BODY["messages"]))  # type: ignore[arg-type]
        assert answers.choices[0].reply.content == "yes"
        assert (await server.end("1-0")).last_reply == answers.choices[0].reply
        await server.close()

    asyncio.run(play())


def test_a_connection_that_sends_no_http(gateway: RunningGateway) -> None:
    access = gateway.open(Script("yes"))
    port = int(gateway.server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 400")
    assert json.loads(post(access).content)["choices"]
