"""How the proxy asks both servers at once, and how an operator drains a server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from unittest import mock

from aiohttp import web

from fake_vllm import WORDS, Does
from kvferry.vllm.proxy_operator import Operator
from kvferry.vllm.proxy_servers import REFUSES_SECONDS, SETTLED_ANSWERS, Servers
from proxy_scene import Scene, in_scene, texts, until, writing

# ---- both at once


@in_scene()
async def test_both_servers_are_asked_at_once_when_the_engine_is_known(scene: Scene) -> None:
    writing(scene)
    assert await scene.ask() == (200, " ".join(("loaded:P0", *WORDS)))
    assert await scene.metric('handed_over_total{way="in_turn"}') == 1
    scene.prefill[0].does = Does.WAIT
    asking = asyncio.create_task(scene.ask())
    await until(lambda: len(scene.decode[0].asked) == 2)  # though the prefill server has not answered
    scene.prefill[0].go.set()
    assert await asking == (200, " ".join(("loaded:P0", *WORDS)))
    assert await scene.metric('handed_over_total{way="at_once"}') == 1
    (told,), (asked,) = scene.decode[0].announced, scene.prefill[0].announced
    name = asked["kvferry_transfer_id"]
    assert re.fullmatch("[0-9a-f]{32}", name)
    assert asked == {"do_remote_decode": True, "do_remote_prefill": False, "kvferry_transfer_id": name}
    assert {key: value for key, value in told.items() if value is not None} == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "P0",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_request_id": told["remote_request_id"],
        "transfer_mode": "push",
        "kvferry_transfer_id": name,
        "kvferry_weights": "w1",
        "kvferry_versions": [1, 1],
    }


@in_scene()
async def test_each_server_is_asked_once_although_answers_are_false(scene: Scene) -> None:
    """Before aiohttp 3.12 an answer is a mapping, which has no truth of its own and is empty."""
    writing(scene)
    with mock.patch.object(web.StreamResponse, "__bool__", lambda _: False, create=True):
        for _ in range(3):
            assert await scene.ask() == (200, " ".join(("loaded:P0", *WORDS)))
    assert [len(server.asked) for server in (*scene.prefill, *scene.decode)] == [3, 3]
    assert await scene.metric('handed_over_total{way="at_once"}') == 2


@in_scene()
async def test_each_transfer_has_another_name(scene: Scene) -> None:
    writing(scene)
    for _ in range(4):
        assert texts(await scene.stream()) == ["loaded:P0", *WORDS]
    names = [told["kvferry_transfer_id"] for told in scene.decode[0].announced]
    assert len(set(names)) == len(names) == 3


@in_scene()
async def test_servers_that_are_read_from_are_asked_in_turn(scene: Scene) -> None:
    for _ in range(3):
        assert (await scene.ask())[1].startswith("loaded:P0")
    assert scene.prefill[0].announced == scene.decode[0].announced == []
    assert await scene.metric('handed_over_total{way="in_turn"}') == 3


@in_scene(prefill=2)
async def test_a_prefill_server_that_fails_leaves_no_decode_server_waiting(scene: Scene) -> None:
    writing(scene)
    for _ in range(2):
        await asyncio.gather(scene.ask(), scene.ask())
    for does in (Does.ERROR, Does.DIE, Does.NO_PARAMETERS):
        before, gone = len(scene.decode[0].asked), scene.decode[0].gone
        for server in scene.prefill:
            server.first = [does]
            server.first_waits = lambda before=before: until(lambda: len(scene.decode[0].asked) > before)
        status, text = await scene.ask()
        assert status == 200 and text.endswith(" ".join(WORDS)), does
        assert len(scene.decode[0].asked) == before + 2, does
        await until(lambda gone=gone: scene.decode[0].gone == gone + 1)  # type: ignore[misc]
        for server in scene.prefill:
            server.first = []
        await asyncio.gather(scene.ask(), scene.ask())  # they are known again


@in_scene()
async def test_several_engines_behind_one_url_are_asked_in_turn(scene: Scene) -> None:
    writing(scene)
    scene.prefill[0].engines = itertools.cycle(("P0", "P0", "P1"))
    for _ in range(6):
        assert (await scene.ask())[1].startswith("loaded:")
    # The second; the third's engine was another.
    assert await scene.metric('handed_over_total{way="at_once"}') == 1
    assert await scene.metric('handed_over_total{way="in_turn"}') == 5


@in_scene()
async def test_an_engine_that_has_slept_is_the_same_one(scene: Scene) -> None:
    writing(scene)
    server = scene.proxy.prefill.all[0]
    await scene.ask()
    assert server.engine is not None
    awake = {**server.engine, "remote_registration_generation": 1, "kvferry_transfer_id": "00"}
    server.learn(awake)
    assert server.engine is not None and server.engine["remote_registration_generation"] == 1
    server.learn({**awake, "remote_engine_id": "another"})
    assert server.engine is None


def test_numbers_of_a_request_are_not_taken_for_its_engine() -> None:
    """vLLM 0.33 adds how many tokens of the prompt were cached."""
    server = Servers("prefill", ["http://p"]).all[0]
    engine = {"transfer_mode": "push", "remote_engine_id": "p"}
    for cached in (0, 16, 512):
        numbers = {"remote_prefill_cached_tokens": cached, "remote_num_tokens": cached + 1}
        server.learn({**engine, **numbers, "kvferry_transfer_id": "00"})
        assert server.engine == engine


def test_an_engine_that_is_left_alone_behind_its_url_is_known_again() -> None:
    server = Servers("prefill", ["http://p"]).all[0]
    one = {"transfer_mode": "push", "kvferry_transfer_id": "00", "remote_engine_id": "p_dp0"}
    for engine in ("p_dp0", "p_dp1"):
        server.learn({**one, "remote_engine_id": engine})
    for _ in range(SETTLED_ANSWERS - 1):
        assert server.engine is None
        server.learn({**one, "remote_engine_id": "p_dp1"})
    assert server.engine is not None and server.engine["remote_engine_id"] == "p_dp1"


@in_scene(prefill=2)
async def test_a_server_whose_engine_drains_gets_no_requests_for_a_while(scene: Scene) -> None:
    first, other = scene.proxy.prefill.all
    other.total = 1  # so that the first is asked first
    scene.prefill[0].does = Does.DRAIN
    for _ in range(3):
        assert (await scene.ask())[1].startswith("loaded:P1")
    assert [len(server.asked) for server in scene.prefill] == [1, 3]
    labels = f'{{kind="prefill",server="{first.url}"}}'
    assert await scene.metric(f"server_refuses{labels}") == 1
    assert await scene.metric(f"server_failures_total{labels}") == 1
    scene.prefill[0].does = Does.ANSWER
    assert first._refuses_until - time.monotonic() < REFUSES_SECONDS
    first._refuses_until = time.monotonic()  # the while is over
    assert (await scene.ask())[1].startswith("loaded:P0")
    assert await scene.metric(f"server_refuses{labels}") == 0


@in_scene()
async def test_where_the_only_engine_drains_prompts_are_computed(scene: Scene) -> None:
    scene.prefill[0].does = Does.DRAIN
    for _ in range(3):
        assert (await scene.ask())[1].startswith("computed")
    assert len(scene.prefill[0].asked) == 1
    assert await scene.metric('computed_total{reason="no_prefill_server"}') == 3
    (server,) = scene.proxy.prefill.all
    assert server.refuses
    scene.proxy.prefill.found(server, False)
    scene.proxy.prefill.found(server, True)
    assert not server.refuses  # it was started again


@in_scene()
async def test_an_engine_that_drains_leaves_no_decode_server_waiting(scene: Scene) -> None:
    writing(scene)
    await scene.ask()
    scene.prefill[0].does = Does.DRAIN
    scene.prefill[0].first_waits = lambda: until(lambda: len(scene.decode[0].asked) == 2)
    assert (await scene.ask())[1].startswith("computed")
    await until(lambda: scene.decode[0].gone == 1)
    assert await scene.metric('computed_total{reason="no_prefill_server"}') == 1
    assert await scene.metric('handed_over_total{way="at_once"}') == 0


@in_scene()
async def test_a_client_that_goes_away_ends_both(scene: Scene) -> None:
    writing(scene)
    await scene.ask()
    scene.prefill[0].does = Does.HANG
    asking = asyncio.create_task(scene.ask())
    await until(lambda: len(scene.decode[0].asked) == 2 and len(scene.prefill[0].asked) == 2)
    asking.cancel()
    await until(lambda: scene.decode[0].gone == 1 and scene.prefill[0].gone == 1)


@in_scene()
async def test_an_engine_is_forgotten_with_its_server(scene: Scene) -> None:
    writing(scene)
    await scene.ask()
    server = scene.proxy.prefill.all[0]
    assert server.engine is not None
    scene.proxy.prefill.found(server, False)
    assert server.engine is None
    scene.proxy.prefill.found(server, True)
    assert (await scene.ask())[1].startswith("loaded:P0")
    assert scene.decode[0].announced == []


# ---- servers that drain


@contextlib.asynccontextmanager
async def operator(
    scene: Scene,
) -> AsyncIterator[Callable[..., Coroutine[Any, Any, tuple[int, dict[str, Any]]]]]:
    """What an operator asks: status and answer."""
    runner = web.AppRunner(Operator((scene.proxy.prefill, scene.proxy.decode)).app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def ask(path: str, **query: Any) -> tuple[int, dict[str, Any]]:
        async with scene.client.post(url + path, params=query) as answer:
            return answer.status, await answer.json()

    try:
        yield ask
    finally:
        await runner.cleanup()


@in_scene(prefill=2)
async def test_requests_under_way_end_and_other_servers_get_the_new_ones(scene: Scene) -> None:
    async with operator(scene) as ask:
        first = scene.prefill[0]
        first.does = Does.WAIT
        asking = asyncio.create_task(scene.ask(prompt="under way"))
        await until(lambda: len(first.asked) == 1)
        drain = asyncio.create_task(ask("/drain", server=first.url))
        await until(lambda: scene.proxy.prefill.all[0].drains)
        for _ in range(4):
            assert (await scene.ask())[1].startswith("loaded:P1")
        assert len(first.asked) == 1 and not drain.done()
        assert await ask("/drain", server=first.url, seconds=0) == (
            504,
            {"server": first.url, "drains": True, "requests": 1, "lent": 0},
        )
        first.go.set()
        assert (await asking)[1].startswith("loaded:P0")
        assert await drain == (200, {"server": first.url, "drains": True, "requests": 0, "lent": 0})
        assert await ask("/resume", server=first.url) == (200, {"server": first.url, "drains": False})
        first.does = Does.ANSWER
        while len(first.asked) == 1:
            assert (await scene.ask())[0] == 200


@in_scene()
async def test_a_server_whose_cache_is_not_loaded_yet_has_not_drained(scene: Scene) -> None:
    async with operator(scene) as ask:
        scene.decode[0].does = Does.WAIT
        asking = asyncio.create_task(scene.ask())
        await until(lambda: len(scene.decode[0].asked) == 1)  # so the prefill server has answered
        status, left = await ask("/drain", server=scene.prefill[0].url, seconds=0)
        assert (status, left["requests"], left["lent"]) == (504, 0, 1)
        scene.decode[0].go.set()
        assert (await asking)[1].startswith("loaded:P0")
        assert (await ask("/drain", server=scene.prefill[0].url))[0] == 200
        scene.decode[0].does = Does.ANSWER
        assert await scene.ask() == (200, " ".join(("computed", *WORDS)))  # there is no other prefill server
        assert len(scene.prefill[0].asked) == 1


@in_scene()
async def test_where_all_decode_servers_drain_that_is_said(scene: Scene) -> None:
    async with operator(scene) as ask:
        assert (await ask("/drain", server=scene.decode[0].url))[0] == 200
        status, text = await scene.ask()
        assert status == 503 and f"drain: {scene.decode[0].url}" in text
        async with scene.client.get(scene.url + "/health") as answer:
            assert answer.status == 503
        await ask("/resume", server=scene.decode[0].url)
        assert (await scene.ask())[0] == 200


@in_scene()
async def test_an_operators_mistakes_are_named_and_clients_have_no_such_door(scene: Scene) -> None:
    async with operator(scene) as ask:
        status, answer = await ask("/drain", server="http://nobody")
        assert status == 400 and scene.decode[0].url in answer["error"]
        for seconds in ("-1", "soon", "nan", "1e9"):
            status, answer = await ask("/drain", server=scene.decode[0].url, seconds=seconds)
            assert status == 400 and "seconds is" in answer["error"]
        assert not scene.proxy.decode.all[0].drains
        async with scene.client.post(f"{scene.url}/drain?server={scene.decode[0].url}") as refused:
            assert refused.status == 404
