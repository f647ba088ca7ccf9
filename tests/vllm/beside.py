"""kvferry's connector in a MultiConnector, beside vLLM's example, which keeps caches in files; and vLLM's KV
events.

The example knows one group of layers only, so the servers have one. Each has a folder of its own, so what the
decode server loads of a new prompt comes over kvferry. The decode server must say of each whole block that it
is stored, in events that name the block's tokens: when it computes the prompt, and when it loads it. Where
parameters are missing, the second connector's files are loaded.
"""

from __future__ import annotations

import time

import msgspec
import zmq
from asking import LOADS, NEW_TOKENS, Asking, Judge
from pair import Pair, answer
from vllm.distributed.kv_events import BlockStored, KVEventBatch

WAIT_SECONDS = 60
PROMPTS = 3


class Beside(Asking):
    """Runs all of it."""

    def __init__(self, judge: Judge, pair: Pair) -> None:
        super().__init__(judge, pair)
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._waiting: list[list[int]] = []  # tokens of blocks that were said to be stored, not looked at yet
        self._events = zmq.Context.instance().socket(zmq.SUB)
        self._events.subscribe("")
        self._events.bind(pair.events)  # the server connects: an address without a wildcard is another's

    def run(self) -> None:
        """All of it."""
        try:
            self.heard()
            for i in range(PROMPTS):
                self.one(f"prompt {i + 1}")
        finally:
            self._events.close(0)

    def heard(self) -> None:
        """Events are heard from here on: of prompts that are computed until one is."""
        until = time.monotonic() + WAIT_SECONDS
        while not self._events.poll(100) and time.monotonic() < until:
            self._decode.ask(self.prompt(), 1)
        self.judge("the decode server publishes events", bool(self._events.poll(0)))

    def one(self, what: str) -> None:
        """A prompt that is computed here, handed over, and found in the files."""
        prompt, other = self.prompt(), self.prompt()
        files = self.files()
        params = self._pair.params(prompt)
        self.judge(f"{what}: the second connector of the prefill server has stored it", self.files() > files)
        want, differs = (
            answer(self._decode.ask(said, NEW_TOKENS, salt="alone")).tokens for said in (prompt, other)
        )
        self.judge(f"{what}: another prompt has another answer", differs != want)
        self.stored(f"{what}: computed", prompt)
        loads = self._decode.counter(LOADS)
        got, loaded = self.ask(prompt, params)
        self.judge(f"{what}: handed over: all of it was loaded", loaded == len(prompt), f"{loaded} tokens")
        self.judge(f"{what}: handed over: by kvferry", self._decode.counter(LOADS) == loads + 1)
        self.judge(f"{what}: handed over: same tokens", got == want, f"{got} not {want}")
        self.stored(f"{what}: handed over", prompt)
        got, loaded = self.ask(prompt, None, salt="from files")
        self.judge(
            f"{what}: without parameters, files are loaded", 0 < loaded < len(prompt), f"{loaded} tokens"
        )
        self.judge(f"{what}: without parameters: not by kvferry", self._decode.counter(LOADS) == loads + 1)
        self.judge(f"{what}: without parameters: same tokens", got == want, f"{got} not {want}")

    def ask(
        self, prompt: list[int], params: dict[str, object] | None, salt: str | None = None
    ) -> tuple[list[int], int]:
        """The decode server's answer, and how many tokens any connector has loaded for it."""
        before = self._decode.loaded_tokens()
        found = answer(self._decode.ask(prompt, NEW_TOKENS, params, salt=salt)).tokens
        return found, self._decode.loaded_tokens() - before

    def files(self) -> int:
        """How many the prefill server's second connector has written."""
        return sum(1 for _ in self._pair.beside("prefill").rglob("*.safetensors"))

    def stored(self, what: str, prompt: list[int]) -> None:
        """The next events that name tokens of the prompt name all of its whole blocks, in order."""
        size = self._pair.case.decode.block_size
        assert size is not None
        whole, found = prompt[: len(prompt) // size * size], list[int]()
        while len(found) < len(whole) and (tokens := self._next()) is not None:
            if tokens == whole[len(found) : len(found) + len(tokens)]:
                found += tokens
        self.judge(f"{what}: events of {len(whole) // size} blocks", found == whole, f"{len(found)} tokens")

    def _next(self) -> list[int] | None:
        """The tokens of the next blocks that are said to be stored; None: nothing comes any more."""
        until = time.monotonic() + WAIT_SECONDS
        while not self._waiting and time.monotonic() < until:
            if self._events.poll(1000):
                _, _, payload = self._events.recv_multipart()
                events = self._decoder.decode(payload).events
                self._waiting += [list(event.token_ids) for event in events if isinstance(event, BlockStored)]
        return self._waiting.pop(0) if self._waiting else None
