"""Conversations through the proxy: the prefill server is told where the answer before is kept."""

from __future__ import annotations

import pytest

from fake_vllm import WORDS, Does
from kvferry.vllm.proxy_servers import Servers, read_prompt
from kvferry.vllm.proxy_turns import KEPT_SECONDS, MOST_TURNS, Turns
from proxy_scene import Scene, in_scene, writing


def told(scene: Scene) -> list[str]:
    """The answers, by name, that the prefill server was told of."""
    return [params["remote_request_id"] for params in scene.prefill[0].before]


@in_scene()
async def test_a_prefill_server_is_told_where_the_turn_before_is_kept(scene: Scene) -> None:
    scene.decode[0].keeps = True
    await scene.ask(prompt=[1, 2, 3])
    assert told(scene) == []
    assert await scene.ask(prompt=[1, 2, 3, 4, 5]) == (200, " ".join(("loaded:P0", *WORDS)))
    (before,) = scene.prefill[0].before
    assert before == {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": "D0",
        "remote_request_id": "D0-kept-0",
        "remote_host": "127.0.0.1",
        "remote_port": 2,
        "kvferry_transfer_id": b"D0-kept-0".hex(),
    }
    assert "remote_request_id" in scene.decode[0].asked[1]["kv_transfer_params"]  # in its turn, as always
    await scene.ask(prompt=[1, 2, 3, 4, 5, 6])
    assert told(scene) == ["D0-kept-0", "D0-kept-1"]
    assert await scene.metric('handed_over_total{way="with_turn_before"}') == 2
    assert await scene.metric('handed_over_total{way="in_turn"}') == 1


@in_scene()
async def test_turns_of_chats_and_of_streams(scene: Scene) -> None:
    scene.decode[0].keeps = True
    said: list[dict[str, str]] = [{"role": "user", "content": "what moves?"}]
    for stream in (False, True, True, False):
        async with scene.client.post(
            scene.url + "/v1/chat/completions", json={"messages": said, "stream": stream}
        ) as answer:
            assert answer.status == 200 and await answer.read()
        said += [{"role": "assistant", "content": "a cache"}, {"role": "user", "content": "where?"}]
    assert told(scene) == ["D0-kept-0", "D0-kept-1", "D0-kept-2"]


@in_scene()
async def test_an_answer_is_told_of_once_and_only_where_a_prompt_goes_on(scene: Scene) -> None:
    scene.decode[0].keeps = True
    await scene.ask(prompt="one and one")
    for other in (
        {"prompt": "one and one"},  # the same again
        {"prompt": "two and one are three"},
        {"prompt": "one and one are two", "model": "another"},
        {"prompt": "one and one are two", "cache_salt": "another"},
        {"prompt": "one and one are two", "n": 2},
        {"prompt": "one and"},
    ):
        await scene.ask(**other)
    assert told(scene) == []
    await scene.ask(prompt="one and one are two")
    assert len(told(scene)) == 1
    await scene.ask(prompt="one and one are not")  # goes on with "one and", which was answered, too
    await scene.ask(prompt="one and one are none")
    assert len(told(scene)) == 2


@in_scene(decode=2)
async def test_an_answer_of_a_server_that_is_down_is_not_told_of(scene: Scene) -> None:
    for server in scene.decode:
        server.keeps = True
    await scene.ask(prompt="one")
    for known in scene.proxy.decode.all:
        known.up = known.total == 0  # the other one answered
    await scene.ask(prompt="one and")
    assert told(scene) == []


@in_scene(prefill=2)
async def test_a_second_prefill_server_is_not_told_of_what_the_first_may_have_used(scene: Scene) -> None:
    scene.decode[0].keeps = True
    await scene.ask(prompt="one")
    for server in scene.prefill:
        server.first = [Does.ERROR]
    assert (await scene.ask(prompt="one and"))[0] == 200
    assert sorted(len(server.before) for server in scene.prefill) == [0, 1]


@in_scene()
async def test_where_a_turn_is_read_the_servers_are_asked_in_turn(scene: Scene) -> None:
    writing(scene)
    scene.decode[0].keeps = True
    await scene.ask(prompt="one")
    await scene.ask(prompt="one and")
    assert (len(told(scene)), scene.decode[0].announced) == (1, [])
    await scene.ask(prompt="another")
    assert len(scene.decode[0].announced) == 1


def test_turns_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    server, turns = Servers("decode", ["http://d"]).all[0], Turns()
    now = [0.0]
    monkeypatch.setattr("kvferry.vllm.proxy_turns.time.monotonic", lambda: now[0])
    first, longer = read_prompt({"prompt": "one"}), read_prompt({"prompt": "one and one"})
    turns.keep(server, first, {"n": 1})
    now[0] = KEPT_SECONDS
    assert turns.take(longer) is None
    turns.keep(server, first, {"n": 2})
    turns.keep(server, read_prompt({"prompt": "one and"}), {"n": 3})
    for _ in range(2):  # of the same prompt: the latest counts
        turns.keep(server, read_prompt({"prompt": "one and o"}), {"n": 4})
    turns.keep(server, read_prompt({}), {"n": 5})
    assert [turns.take(longer) for _ in range(4)] == [{"n": 4}, {"n": 3}, {"n": 2}, None]
    turns.keep(server, first, {"n": 6})
    for i in range(MOST_TURNS):
        turns.keep(server, read_prompt({"prompt": f"{i} others"}), {})
    assert turns.take(longer) is None
