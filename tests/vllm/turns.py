"""A conversation over two servers with prefix caches: in each turn only new tokens move, there and back.

A turn's prompt is the conversation so far, with the answers, and some new tokens. The prefill server gets the
decode server's parameters of the turn before: it reads the answer and computes the new tokens, which the decode
server then reads. A server's prefix cache has whole blocks of its own size; exactly the tokens after these must
move, and the bytes of each turn are compared with that.

Controls: without the parameters of the turn before, the prefill server must read nothing; another beginning
must give another answer; and a block that is corrupted after a load must change the answer.

The same conversation is held through the proxy, whose client says nothing of the turn before; and with streamed
answers, if this vLLM has parameters in streams.
"""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from asking import Asking, Judge
from pair import TO_PREFILL, Pair, answer
from proxies import RunningProxy
from servers import Server, greedy
from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

TURNS = 10
FIRST = 200
ANSWER = 40
CROWD = 14  # conversations, whose answers need more blocks than decode servers have: those of 4760 tokens
BYTES = "vllm:kvferry_load_size_bytes_sum"  # bytes read, and bytes that a peer has written


@dataclass(frozen=True)
class Turn:
    """The result of a turn: tokens, and bytes that each server has read for it."""

    tokens: list[int]
    params: dict[str, Any] | None
    there: int
    here: int


class Turns(Asking):
    """Runs all cases."""

    def __init__(self, judge: Judge, pair: Pair) -> None:
        super().__init__(judge, pair)
        config = json.loads((pair.folder / pair.case.model / "config.json").read_text())
        self._token_bytes = (
            config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 4
        )

    def run(self) -> None:
        """Runs all cases."""
        talk, last = self.conversation()
        self.forgotten(talk, last)
        self.corrupted(talk)
        self.crowded()
        self.outdated()

    def outdated(self) -> None:
        """Caches of the decode server are reset while nothing runs: answers go with those of connectors."""
        talk = self.new(FIRST)
        first = self.turn(talk, None)
        self.judge(
            "caches of vLLM alone are not reset while an answer is kept", not self._reset(external=False)
        )
        self._reset(external=True)
        end, done = time.monotonic() + 30, False
        while not done and time.monotonic() < end:
            done = self._reset(external=False)
        self.judge("with those of connectors they are", done)
        talk += first.tokens + self.new(20)
        found = self.turn(talk, first.params)
        self.judge("an answer from before the reset is not read", found.there == 0, f"{found.there} bytes")
        self.judge("the turn after the reset: same tokens", found.tokens == self.alone(talk))

    def _reset(self, external: bool) -> bool:
        """Resets the decode server's caches; returns whether vLLM says so."""
        where = f"http://127.0.0.1:{self._decode.port}/reset_prefix_cache?reset_external={external}"
        with urllib.request.urlopen(urllib.request.Request(where, b"", method="POST"), timeout=60) as answer:
            return bool(json.load(answer)["success"])

    def crowded(self) -> None:
        """More conversations begin than the decode server has blocks for: its oldest answers give way."""
        talks = [self.new(FIRST + 100) for _ in range(CROWD)]
        want = [self.alone(talk) for talk in talks]
        turns = [self.turn(talk, None) for talk in talks]
        for i, found in enumerate(turns):
            self.judge(f"conversation {i + 1} of {CROWD}: same tokens", found.tokens == want[i])
            kept = (found.params or {}).get("remote_num_tokens")
            self.judge(f"conversation {i + 1} of {CROWD}: the answer is kept", kept == FIRST + 100 + ANSWER - 1)
        for i, reads in ((CROWD - 1, True), (0, False)):
            talk = talks[i] + turns[i].tokens + self.new(20)
            found = self.turn(talk, turns[i].params)
            what = (
                f"conversation {i + 1} goes on, and its answer {'is' if reads else 'has gone and is not'} read"
            )
            self.judge(what, bool(found.there) == reads, f"{found.there} bytes")
            self.judge(f"{what}: same tokens", found.tokens == self.alone(talk))

    def new(self, count: int) -> list[int]:
        """New random tokens."""
        return [self._chance.randrange(3, 500) for _ in range(count)]

    def turn(self, prompt: list[int], before: dict[str, Any] | None) -> Turn:
        """One turn, after what the decode server has said of the last one."""
        servers = (self._prefill, self._decode)
        read = [server.counter(BYTES) for server in servers]
        found = self.ask(prompt, before)
        there, here = (server.counter(BYTES) - was for server, was in zip(servers, read, strict=True))
        return Turn(answer(found).tokens, found.get("kv_transfer_params"), there, here)

    def ask(self, prompt: list[int], before: dict[str, Any] | None) -> dict[str, Any]:
        """The answer that a client gets, as a proxy asks for it that passes on what was said before."""
        params = self._prefill.ask(prompt, 1, before or dict(TO_PREFILL))["kv_transfer_params"]
        return self._decode.ask(prompt, ANSWER, params)

    def alone(self, prompt: list[int]) -> list[int]:
        """The answer that the decode server computes itself, without any moved block."""
        return answer(self._decode.ask(prompt, ANSWER, salt="alone")).tokens

    def conversation(self, how: str = "") -> tuple[list[int], Turn]:
        """Runs all turns; returns the whole conversation and the last turn."""
        talk, done = self.new(FIRST), 0  # done: tokens of the prompt before; computed: with its answer
        computed = moved = 0
        found: Turn | None = None
        for i in range(TURNS):
            here = len(talk) - computed // self._tokens(self._decode) * self._tokens(self._decode)
            there = max(0, computed - done // self._tokens(self._prefill) * self._tokens(self._prefill))
            found = self.turn(talk, found.params if found else None)
            what = f"turn {i + 1}{how}, {len(talk)} tokens"
            want = self.alone(talk)
            self.judge(f"{what}: same tokens", found.tokens == want, f"{found.tokens} not {want}")
            self._judge_bytes(f"{what}: the prefill server reads {there} tokens", found.there, there)
            self._judge_bytes(f"{what}: the decode server reads {here} tokens", found.here, here)
            kept = (found.params or {}).get("remote_num_tokens")
            computed, done = len(talk) + ANSWER - 1, len(talk)
            self.judge(f"{what}: the answer is kept", kept == computed, f"{kept}")
            moved += there + here
            talk += found.tokens + self.new(20 + 7 * i)
        assert found is not None
        self.record(f"{moved} tokens moved in {TURNS} turns{how}, of a conversation of {done + ANSWER}")
        return talk, found

    @staticmethod
    def _tokens(server: Server) -> int:
        assert server.side.block_size is not None
        return server.side.block_size

    def _judge_bytes(self, what: str, got: int, tokens: int) -> None:
        want = tokens * self._token_bytes
        self.judge(what, got == want, f"{got} bytes, not {want}")

    def forgotten(self, talk: list[int], last: Turn) -> None:
        """The prefill server is not told of the turn before: it computes the answer itself, and reads
        nothing."""
        found, want = self.turn(talk, None), self.alone(talk)
        self.judge("not told of the turn before: same tokens", found.tokens == want)
        self._judge_bytes("not told of the turn before: the prefill server reads nothing", found.there, 0)
        self.judge("another turn: other tokens", found.tokens != last.tokens)

    def corrupted(self, talk: list[int]) -> None:
        """Compares the answer to another conversation of this length with and without a corrupted block."""
        other = self.new(64) + talk[64:]
        want = self.alone(other)
        self.judge("another beginning: another answer", want != self.alone(talk))
        self._pair.corrupt.write_text("attention")
        found = self.turn(other, None)
        self._pair.corrupt.unlink()
        self.judge("a corrupted block changes the answer", found.tokens != want)


class ProxyTurns(Turns):
    """The same through the proxy."""

    _proxy: RunningProxy
    _streams = False

    def run(self) -> None:
        """All of it."""
        with self._pair.proxy() as self._proxy:
            talk, last = self.conversation()
            if "kv_transfer_params" in CompletionStreamResponse.model_fields:
                self._streams = True
                self.conversation(", streamed")
                self._streams = False
        with self._pair.proxy() as self._proxy:  # which knows nothing of the turn before
            self.forgotten(talk, last)
            self.corrupted(talk)

    def ask(self, prompt: list[int], before: dict[str, Any] | None) -> dict[str, Any]:
        """The answer of the proxy, which is told the prompt only."""
        body = greedy(prompt, ANSWER, None) | {"logprobs": 1}
        if self._streams:
            return whole(self._proxy.events(body))
        found: dict[str, Any] = json.loads(self._proxy.ask("/v1/completions", body))
        return found


def whole(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A streamed answer as if it had come whole, with the log-probabilities of its first tokens only."""
    choices = [event["choices"][0] for event in events]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return {**events[-1], "choices": [{**choices[0], "token_ids": tokens}]}
