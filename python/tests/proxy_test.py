"""The proxy in front of fake prefill and decode servers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fake_vllm import ROLE, WORDS, Does, FakeServer, running
from kvferry.vllm.proxy import main
from kvferry.vllm.proxy_answers import Failed, first_to_last
from kvferry.vllm.proxy_requests import why_not_handed_over
from kvferry.vllm.proxy_servers import CHUNK_BYTES, MOST_CHUNKS, Servers, read_prompt
from proxy_scene import QUESTION, Scene, in_scene, texts, until

# ---- the ways of requests


@in_scene()
async def test_a_stream_is_prefilled_loaded_and_passed_on(scene: Scene) -> None:
    events = await scene.stream()
    assert events[-1] == "[DONE]"
    assert texts(events) == ["loaded:P0", *WORDS]
    asked, passed = scene.prefill[0].asked[0], scene.decode[0].asked[0]
    assert asked == {
        **QUESTION,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    params = passed.pop("kv_transfer_params")
    assert passed == {**QUESTION, "stream": True}
    assert params["remote_request_id"] == "P0-0" and params["kvferry_transfer_id"] == "00ff"


@in_scene()
async def test_an_answer_that_is_no_stream(scene: Scene) -> None:
    assert await scene.ask() == (200, " ".join(("loaded:P0", *WORDS)))
    assert await scene.metric('requests_total{outcome="answered"}') == 1
    assert await scene.metric("first_byte_seconds_count") == 1


@in_scene()
async def test_a_chat_and_what_a_prefill_server_is_not_asked_for(scene: Scene) -> None:
    said = [{"role": "user", "content": "what moves?"}]
    wanted = {
        "messages": said,
        "max_completion_tokens": 9,
        "min_tokens": 5,
        "logprobs": True,
        "logprob_token_ids": [7],  # which vLLM refuses without logprobs
        "stream_options": {"include_usage": True},
        "top_p": 0.5,
    }
    async with scene.client.post(scene.url + "/v1/chat/completions", json=wanted) as answer:
        assert answer.status == 200
    asked = scene.prefill[0].asked[0]
    assert asked.pop("kv_transfer_params") and asked == {
        "messages": said,
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "stream": False,
        "top_p": 0.5,
    }
    assert scene.decode[0].asked[0].pop("kv_transfer_params") and scene.decode[0].asked[0] == wanted


@in_scene()
async def test_the_parameters_of_a_client_go_nowhere(scene: Scene) -> None:
    evil = {"do_remote_prefill": True, "remote_host": "elsewhere", "remote_request_id": "r"}
    assert (await scene.ask(kv_transfer_params=evil, n=2))[1].startswith("computed")
    assert "kv_transfer_params" not in scene.decode[0].asked[0]
    assert (await scene.ask(kv_transfer_params=evil))[1].startswith("loaded:P0")


@in_scene()
async def test_keys_and_names_go_along(scene: Scene) -> None:
    headers = {"Authorization": "Bearer us", "X-Request-Id": "mine"}
    async with scene.client.post(scene.url + "/v1/completions", json=QUESTION, headers=headers) as answer:
        assert answer.headers["X-Request-Id"] == "mine"
    assert (scene.prefill[0].names, scene.decode[0].names) == (["mine-p0"], ["mine-d0"])
    async with scene.client.get(scene.url + "/v1/models", headers=headers) as answer:
        assert answer.status == 200
    assert (scene.prefill[0].keys, scene.decode[0].keys) == (["Bearer us"], ["Bearer us"] * 2)


def test_what_is_not_handed_over() -> None:
    for body, why in (
        ({"prompt": "one"}, ""),
        ({"prompt": ["one"]}, ""),
        ({"prompt": [1, 2, 3], "n": 1, "best_of": None}, ""),
        ({"prompt": ["one", "two"]}, "several_prompts"),
        ({"prompt": [[1], [2]]}, "several_prompts"),
        ({"prompt_embeds": "AAAA"}, ""),
        ({"prompt_embeds": ["AAAA"], "prompt": None}, ""),
        ({"prompt_embeds": ["AAAA", "BBBB"]}, "several_prompts"),
        ({"prompt_embeds": "AAAA", "prompt": "one"}, "several_prompts"),
        ({"messages": [], "n": 2}, "several_answers"),
        ({"prompt": "one", "best_of": 3}, "several_answers"),
        ({"prompt": "one", "use_beam_search": True}, "several_answers"),
        ({"prompt": "one", "logprobs": 3, "echo": False, "prompt_logprobs": None}, ""),
        ({"prompt": "one", "logprobs": 3, "echo": True}, "prompt_logprobs"),
        ({"messages": [], "prompt_logprobs": 0}, "prompt_logprobs"),
    ):
        assert why_not_handed_over(body) == why, body


@in_scene()
async def test_several_prompts_are_computed_by_a_decode_server(scene: Scene) -> None:
    assert (await scene.ask(prompt=["one", "two"]))[1].startswith("computed")
    assert scene.prefill[0].asked == []
    assert await scene.metric('computed_total{reason="several_prompts"}') == 1


@in_scene(prefill=0)
async def test_without_prefill_servers_decode_servers_do_all(scene: Scene) -> None:
    assert texts(await scene.stream()) == ["computed", *WORDS]


# ---- choosing a server


@in_scene(prefill=2, decode=2)
async def test_requests_spread_over_servers_by_load(scene: Scene) -> None:
    for server in (*scene.prefill, *scene.decode):
        server.does = Does.WAIT
    asking = [asyncio.create_task(scene.ask(prompt=f"{i} what?")) for i in range(4)]
    await until(lambda: sum(len(server.asked) for server in scene.prefill) == 4)
    assert [len(server.asked) for server in scene.prefill] == [2, 2]
    for server in scene.prefill:
        server.go.set()
    await until(lambda: sum(len(server.asked) for server in scene.decode) == 4)
    assert [len(server.asked) for server in scene.decode] == [2, 2]
    assert await scene.metric(f'server_requests{{kind="decode",server="{scene.decode[0].url}"}}') == 2
    for server in scene.decode:
        server.go.set()
    assert all(status == 200 for status, _ in await asyncio.gather(*asking))


@in_scene(prefill=2, decode=2)
async def test_a_prompt_goes_where_its_beginning_was_computed(scene: Scene) -> None:
    known, other = "a" * 3000, "b" * 3000
    await scene.ask(prompt=known)
    first = next(server for server in scene.prefill if server.asked)
    second = next(server for server in scene.prefill if not server.asked)
    await scene.ask(prompt=other)  # goes to the server that did less
    assert len(second.asked) == 1
    for turn in range(3):
        await scene.ask(prompt=known + "c" * 600 * (turn + 1))
    assert (len(first.asked), len(second.asked)) == (4, 1)
    await scene.ask(prompt="d" * 3000)  # no server knows it
    assert (len(first.asked), len(second.asked)) == (4, 2)
    first.does = Does.WAIT  # its queue then costs more than the known prompt saves
    long = asyncio.create_task(scene.ask(prompt=known + "e" * 9000))
    await until(lambda: len(first.asked) == 5)
    await scene.ask(prompt=known)
    assert (len(first.asked), len(second.asked)) == (5, 3)
    first.go.set()
    await long


def test_beginnings_of_prompts() -> None:
    text, longer = "x" * CHUNK_BYTES, "x" * CHUNK_BYTES + "y" * CHUNK_BYTES
    one, two = read_prompt({"prompt": text}), read_prompt({"prompt": longer})
    assert (one.size, len(one.beginnings), len(two.beginnings)) == (CHUNK_BYTES, 1, 2)
    assert two.beginnings[0] == one.beginnings[0] != two.beginnings[1]
    for unlike in ({"model": "m"}, {"cache_salt": "s"}):
        assert read_prompt({"prompt": text, **unlike}).beginnings[0] != one.beginnings[0]
    assert read_prompt({"prompt": [7] * CHUNK_BYTES}).size == 4 * CHUNK_BYTES
    turn = [{"role": "user", "content": "z" * 2 * CHUNK_BYTES}]
    more = [*turn, {"role": "assistant", "content": "z" * CHUNK_BYTES}]
    begun = read_prompt({"messages": turn}).beginnings
    assert read_prompt({"messages": more}).beginnings[: len(begun)] == begun
    for odd in ({}, {"prompt": None}, {"prompt": 7}, {"prompt": [-1]}, {"messages": "no list"}):
        assert len(read_prompt(odd).beginnings) == 0


def test_beginnings_are_forgotten_with_their_server_and_where_there_are_many() -> None:
    servers = Servers("prefill", ["http://a", "http://b"])
    a, b = servers.all
    a.total = 1
    prompt = read_prompt({"prompt": "x" * 3000})
    assert servers.choose(prompt) is b
    servers.remember(a, prompt)
    assert servers.choose(prompt) is a
    servers.found(a, False)
    assert servers.choose(prompt) is b
    servers.found(a, True)
    assert servers.choose(prompt) is b  # a server that came back has no cache
    servers.remember(a, prompt)
    for i in range(MOST_CHUNKS):
        servers.remember(b, read_prompt({"prompt": f"{i:06}" + "x" * CHUNK_BYTES}))
    assert servers.choose(prompt) is b


# ---- failures before the client has seen anything


@in_scene(prefill=2)
async def test_a_prefill_server_that_fails_is_done_without(scene: Scene) -> None:
    for does in (Does.ERROR, Does.BUSY, Does.DIE):
        scene.prefill[0].does = does
        for server in scene.proxy.prefill.all:
            server.total = 0  # so that the first is asked first
        assert (await scene.ask())[1].startswith("loaded:P1"), does
    assert len(scene.prefill[0].asked) == 3
    assert await scene.metric(f'server_failures_total{{kind="prefill",server="{scene.prefill[0].url}"}}') == 3


@in_scene(prefill=2)
async def test_a_server_that_failed_is_not_asked_again_though_it_knows_the_prompt(scene: Scene) -> None:
    known = "a" * 3000
    await scene.ask(prompt=known)
    first = next(server for server in scene.prefill if server.asked)
    first.does = Does.ERROR
    assert (await scene.ask(prompt=known))[1].startswith("loaded:")
    assert len(first.asked) == 2


@in_scene(prefill=2)
async def test_prompts_are_computed_while_no_prefill_server_can(scene: Scene) -> None:
    for server in scene.prefill:
        server.does = Does.ERROR
    assert texts(await scene.stream()) == ["computed", *WORDS]
    assert [len(server.asked) for server in scene.prefill] == [1, 1]
    assert await scene.metric('computed_total{reason="no_prefill_server"}') == 1


@in_scene()
async def test_a_prefill_server_without_a_connector(scene: Scene) -> None:
    scene.prefill[0].does = Does.NO_PARAMETERS
    assert (await scene.ask())[1].startswith("computed")
    assert await scene.metric('computed_total{reason="no_parameters"}') == 1


@in_scene(prefill=2, patience=2.0)
async def test_a_prefill_server_that_hangs_is_left_after_a_while(scene: Scene) -> None:
    scene.prefill[0].does = Does.HANG
    assert (await scene.ask())[1].startswith("loaded:P1")
    await until(lambda: scene.prefill[0].gone == 1)


@in_scene(decode=2)
async def test_parameters_that_may_be_used_up_are_not_used_again(scene: Scene) -> None:
    for does in (Does.ERROR, Does.DIE):
        for fake, known in zip(scene.decode, scene.proxy.decode.all, strict=True):
            fake.asked.clear()
            known.total = 0  # so that the first is asked first
        scene.decode[0].does = does
        assert (await scene.ask())[1].startswith("computed"), does
        assert "kv_transfer_params" in scene.decode[0].asked[0]
        assert "kv_transfer_params" not in scene.decode[1].asked[0]
    assert await scene.metric('computed_total{reason="tried_again"}') == 2


@in_scene(decode=2)
async def test_parameters_that_nobody_has_heard_are_used_elsewhere(scene: Scene) -> None:
    await scene.decode[0].stop()
    assert (await scene.ask())[1].startswith("loaded:P0")
    assert not scene.proxy.decode.all[0].up


@in_scene()
async def test_a_stream_that_begins_with_an_error_is_begun_again(scene: Scene) -> None:
    """The only decode server computes what it could not load."""
    for does in (Does.EVENT, Does.EMPTY):
        scene.decode[0].first = [does]
        assert texts(await scene.stream()) == ["computed", *WORDS]


@in_scene()
async def test_a_chat_that_begins_with_a_role_and_an_error_is_begun_again(scene: Scene) -> None:
    """vLLM sends the role before it looks whether the load has failed."""
    chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "what moves?"}]}
    scene.decode[0].first = [Does.EVENT]
    role, *events = await scene.stream(**chat)
    assert json.loads(role)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts(events) == ["computed", *WORDS]
    assert await scene.metric('requests_total{outcome="answered"}') == 1


def test_what_a_client_gets_of_a_stream_begins_with_something_said() -> None:
    said = ROLE + b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\ndata: [DONE]\n\n'
    failed = ROLE + ROLE + b'data: {"error": {"message": "the load failed"}}\n\ndata: [DONE]\n\n'
    ends = ROLE.replace(b'"finish_reason": null', b'"finish_reason": "stop"')
    calls = ROLE.replace(b'"content": ""', b'"content": null, "tool_calls": [{"index": 0}]')
    for step in (1, 7, 1000):
        assert b"".join(got := pieces_of(said, step)) == said and got[0].startswith(ROLE + b"data: ")
        for whole in (ends, calls, b": alive\n\n", b"data: no JSON\n\n", b"data: [7]\n\n", b"no event"):
            assert b"".join(pieces_of(whole, step)) == whole
        with pytest.raises(Failed, match="the load failed"):
            pieces_of(failed, step)


def pieces_of(stream: bytes, step: int) -> list[bytes]:
    """What the proxy passes on of a stream that comes in pieces of `step` bytes."""

    async def iter_any() -> AsyncIterator[bytes]:
        for begin in range(0, len(stream), step):
            yield stream[begin : begin + step]

    async def go() -> list[bytes]:
        answer: Any = SimpleNamespace(content=SimpleNamespace(iter_any=iter_any))
        return [piece async for piece in first_to_last(answer, True)]

    return asyncio.run(go())


@in_scene(decode=2)
async def test_a_failure_of_all_servers_is_told(scene: Scene) -> None:
    for server in scene.decode:
        server.does = Does.ERROR
    status, text = await scene.ask()
    assert status == 502 and "says 500" in text
    assert sum(len(server.asked) for server in scene.decode) == 3
    assert await scene.metric('requests_total{outcome="failed"}') == 1


@in_scene(decode=2)
async def test_a_request_that_is_wrong_is_refused_once(scene: Scene) -> None:
    scene.decode[0].does = scene.decode[1].does = Does.REFUSE
    status, text = await scene.ask()
    assert status == 400 and "says 400" in text
    assert sum(len(server.asked) for server in scene.decode) == 1
    scene.prefill[0].does = Does.REFUSE
    status, text = await scene.ask()
    assert status == 400 and "P0 says 400" in text
    assert sum(len(server.asked) for server in scene.decode) == 1
    assert await scene.metric('requests_total{outcome="refused"}') == 2


@in_scene()
async def test_bodies_that_are_no_requests(scene: Scene) -> None:
    for body, text in (
        (b"{", "not JSON"),
        (b"[1]", "not an object"),
        (b"\xff", "not JSON"),
        (b'{"prompt":' + b"[" * 100_000, "lists or objects in each other"),
    ):
        async with scene.client.post(scene.url + "/v1/completions", data=body) as answer:
            assert answer.status == 400 and text in await answer.text()
    assert scene.prefill[0].asked == []


# ---- failures in the middle of an answer


@in_scene(decode=2)
async def test_a_stream_that_breaks_is_not_begun_again(scene: Scene) -> None:
    scene.decode[0].does = Does.DIE
    events: list[str] = []
    with pytest.raises(aiohttp.ClientError):
        await scene.stream_into(events)
    assert texts(events[:2]) == ["loaded:P0", WORDS[0]]
    assert "error" in json.loads(events[2]) and len(events) == 3
    assert scene.decode[1].asked == []
    assert await scene.metric('requests_total{outcome="broken"}') == 1
    assert (await scene.ask())[0] == 200  # the other goes on


@in_scene(patience=2.0)
async def test_a_server_that_falls_silent_in_the_middle_breaks_the_stream(scene: Scene) -> None:
    async def two_pieces(request: web.Request, does: Does, params: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "one"}]}\n\n')
        await asyncio.Event().wait()
        return response

    scene.decode[0]._stream = two_pieces  # type: ignore[method-assign]
    events: list[str] = []
    with pytest.raises(aiohttp.ClientError):
        await scene.stream_into(events)
    assert texts(events[:1]) == ["one"] and "error" in json.loads(events[1])


# ---- clients that go away


@in_scene()
async def test_a_client_that_goes_away_ends_its_prefill(scene: Scene) -> None:
    scene.prefill[0].does = Does.HANG
    asking = asyncio.create_task(scene.ask())
    await until(lambda: len(scene.prefill[0].asked) == 1)
    assert scene.prefill[0].gone == 0
    asking.cancel()
    await until(lambda: scene.prefill[0].gone == 1)
    assert scene.decode[0].asked == []
    await until(lambda: scene.proxy.prefill.all[0].now == 0)
    assert await scene.metric('requests_total{outcome="client_gone"}') == 1


@in_scene()
async def test_a_client_that_goes_away_ends_its_decode(scene: Scene) -> None:
    scene.decode[0].does = Does.HANG
    for ask in (scene.ask, scene.stream):
        gone = scene.decode[0].gone
        asking = asyncio.create_task(ask())
        await until(lambda gone=gone: len(scene.decode[0].asked) == gone + 1)  # type: ignore[misc]
        asking.cancel()
        await until(lambda gone=gone: scene.decode[0].gone == gone + 1)  # type: ignore[misc]
    assert scene.proxy.decode.all[0].load == 0


@in_scene()
async def test_a_client_that_goes_away_in_the_middle_of_a_stream(scene: Scene) -> None:
    scene.decode[0].does = Does.ANSWER
    pieces = 0

    async def for_ever(request: web.Request, does: Does, params: Any) -> web.StreamResponse:
        nonlocal pieces
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        while True:
            await response.write(b'data: {"choices": [{"text": "more"}]}\n\n')
            pieces += 1
            await asyncio.sleep(0.01)

    scene.decode[0]._stream = for_ever  # type: ignore[method-assign]
    events: list[str] = []
    asking = asyncio.create_task(scene.stream_into(events))
    await until(lambda: len(events) > 3)
    asking.cancel()
    await until(lambda: scene.decode[0].gone == 1)
    await until(lambda: scene.proxy.decode.all[0].now == 0)


# ---- health


@in_scene(prefill=1, decode=2, health=0.05)
async def test_servers_that_are_down_are_not_asked_until_they_are_back(scene: Scene) -> None:
    async def health() -> int:
        async with scene.client.get(scene.url + "/health") as answer:
            return answer.status

    known = scene.proxy.decode.all
    assert await health() == 200
    scene.decode[0].healthy = False
    await until(lambda: not known[0].up)
    for _ in range(3):
        assert (await scene.ask())[0] == 200
    assert (len(scene.decode[0].asked), len(scene.decode[1].asked)) == (0, 3)
    await scene.decode[1].stop()
    await until(lambda: not known[1].up)
    assert await health() == 503
    status, text = await scene.ask()
    assert status == 503 and "no decode server is up" in text
    await scene.decode[1].start()
    scene.decode[0].healthy = True
    await until(lambda: known[0].up and known[1].up)
    assert await health() == 200 and (await scene.ask())[0] == 200


@in_scene()
async def test_models_are_those_of_a_decode_server(scene: Scene) -> None:
    async with scene.client.get(scene.url + "/v1/models") as answer:
        assert (await answer.json())["data"] == [{"id": "D0"}]


@in_scene()
async def test_metrics_are_lines_that_prometheus_reads(scene: Scene) -> None:
    await scene.ask()
    async with scene.client.get(scene.url + "/metrics") as answer:
        assert answer.content_type == "text/plain"
        text = await answer.text()
    lines = text.splitlines()
    if importlib.util.find_spec("prometheus_client"):  # its own parser
        from prometheus_client.parser import text_string_to_metric_families

        types = {family.type for family in text_string_to_metric_families(text)}
        assert "unknown" not in types and {"counter", "gauge"} & types, types
    sample = re.compile(r'^[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? -?[0-9.e+-]+$')
    assert all(line.startswith("# ") or sample.match(line) for line in lines), lines
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert all(
        re.sub(r"_(bucket|sum|count)?$", "", re.split(r"[{ ]", line)[0]) in typed
        or re.split(r"[{ ]", line)[0] in typed
        for line in lines
        if not line.startswith("#")
    )


async def said(proxy: asyncio.subprocess.Process, what: str) -> str:
    """The address that follows on these words in the proxy's log."""
    assert proxy.stderr is not None
    async for line in proxy.stderr:
        if found := re.search(what + r" (http://[0-9.:]+)", line.decode()):
            return found.group(1)
    raise AssertionError(f"the proxy ended and did not say: {what}")


def test_a_proxy_that_is_run_as_a_program() -> None:
    """It answers, cancels requests of clients that go away, and a signal ends it with success."""

    async def go() -> None:
        prefill, decode = FakeServer("P0"), FakeServer("D0")
        async with running(prefill, decode), aiohttp.ClientSession() as client:
            proxy = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvferry.vllm.proxy", "--port", "0"),
                *("--prefill", prefill.url, "--decode", decode.url, "--operator-port", "0"),
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                door = await said(proxy, "the operator is heard at")
                url = await said(proxy, "Running on") + "/v1/completions"
                await until(lambda: bool(decode.looks and prefill.looks))
                async with client.post(url, json=QUESTION) as answer:
                    assert (await answer.json())["choices"][0]["text"].startswith("loaded:P0")
                async with client.post(f"{door}/drain?server={prefill.url}") as answer:
                    assert answer.status == 200
                decode.does = Does.HANG
                asking = asyncio.create_task(client.post(url, json=QUESTION))
                await until(lambda: len(decode.asked) == 2)
                asking.cancel()
                await until(lambda: decode.gone == 1)
                assert len(prefill.asked) == 1
            finally:
                proxy.send_signal(signal.SIGTERM)
                assert await proxy.wait() == 0

    asyncio.run(asyncio.wait_for(go(), 120))


def test_a_command_line_that_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        ([], "--decode"),
        (["--decode", "localhost:8200"], "is not a URL"),
        (["--decode", "http://a", "--patience", "0"], "above 0"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert text in capsys.readouterr().err
