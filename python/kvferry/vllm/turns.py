"""Answers that a decode server keeps for their next turns, and which of them give way when blocks are short.

A kept answer may never be asked for. Without this, a decode server that is full of them could give no request
blocks until their time is over, which is longer than a prefill server waits.

vLLM does not say that it lacks blocks. But it asks how much of a request can be loaded just before it gives the
request blocks, so a request that was asked about and has none when the step is built has to wait for them. Of
running requests that lack blocks vLLM asks whether any will be free soon, before it takes them from another.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.aggregator import RequestKey


class Turns:
    """The answers, and the requests that lack blocks. An answer has the name of its request."""

    def __init__(self) -> None:
        self._wanted: dict[str, int] = {}  # not kept yet; how many blocks each has, once it is known
        self._kept: dict[str, tuple[RequestKey, int]] = {}  # the oldest first
        self._leaving: dict[str, int] = {}  # no longer kept, but not yet free
        self._outdated: set[str] = set()  # of these three: computed before a reset
        self._waiting: dict[str, int] = {}  # requests that vLLM has asked about; how many blocks each needs
        self._running_lack = False  # a running request lacks a block

    # ---- answers

    def want(self, name: str) -> None:
        """The answer of a request that has arrived is to be kept."""
        self._wanted[name] = 0

    def wants(self, name: str) -> bool:
        """Whether the answer of a request is to be kept, and is not yet."""
        return name in self._wanted

    def drop(self, name: str) -> None:
        """The answer of a request is not to be kept, if it was."""
        self._wanted.pop(name, None)
        self._outdated.discard(name)

    def finished(self, name: str, blocks: int) -> None:
        """An answer is whole. It has so many blocks, some of which others may have too."""
        self._wanted[name] = blocks

    def keep(self, key: RequestKey) -> None:
        """The workers keep an answer from this step on."""
        self._kept[key.id.decode()] = (key, self._wanted.pop(key.id.decode()))

    def ended(self, names: Iterable[str]) -> None:
        """Some requests are no longer kept, among them perhaps answers: their blocks are free."""
        for name in names:
            self._kept.pop(name, None)
            self._leaving.pop(name, None)
            self._outdated.discard(name)

    def reset(self) -> None:
        """vLLM's caches begin anew, perhaps with other weights: no answer is kept that is whole by now."""
        self._outdated = {*self._kept, *(name for name, blocks in self._wanted.items() if blocks)}

    @property
    def resets(self) -> bool:
        """Whether answers from before a reset still have blocks."""
        return bool(self._outdated)

    # ---- requests that lack blocks

    def asked(self, request: str, blocks: int) -> None:
        """vLLM is about to give a request blocks, at most so many."""
        if self._kept:
            self._waiting[request] = blocks

    def served(self, request: str) -> None:
        """The request has its blocks, or does not wait for any."""
        self._waiting.pop(request, None)

    def can_help(self) -> bool:
        """A running request lacks blocks: whether kept answers will give way to it."""
        self._running_lack = bool(self._kept or self._leaving)
        return self._running_lack

    def give_way(self, free: int, *, idle: bool) -> list[RequestKey]:
        """A step is built. Returns the answers that are no longer kept: all outdated ones, and those needed.

        Args:
            free: blocks that nobody uses
            idle: nothing runs in this step, so that nothing which runs will free any
        """
        needed = next(iter(self._waiting.values()), 0)  # vLLM serves them one after the other
        lacking = max(needed - free, self._running_lack or (idle and needed > 0))
        self._waiting.clear()
        self._running_lack = False
        given: list[RequestKey] = []
        for name in sorted(self._kept, key=lambda name: name not in self._outdated):  # the oldest first
            if name not in self._outdated and sum(self._leaving.values()) >= lacking:
                break
            key, self._leaving[name] = self._kept.pop(name)
            given.append(key)
        return given
