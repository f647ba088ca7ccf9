"""Hands the caches of sequences over to other engines, and takes theirs.

The cells of a state are copied between the state and pages of an agent, which moves them. So nothing here calls
llama.cpp, and an engine may free or change a sequence as soon as its state has been saved.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry._values import whole_number
from kvferry.agent import Agent
from kvferry.contact import Contact
from kvferry.errors import (
    ClosedError,
    DeadlineError,
    InvalidError,
    LimitError,
    NotFoundError,
    OutOfRangeError,
    UnsupportedError,
)
from kvferry.events import Event, EventKind
from kvferry.llamacpp.pages import Pages
from kvferry.llamacpp.sections import State
from kvferry.llamacpp.state import SequenceCache
from kvferry.model import CONVERTED
from kvferry.request import BlockTable, GroupSteps
from kvferry.scheduler import TransferParams
from kvferry.shard import Engine, GroupSpec
from kvferry.tickets import cancel
from kvferry.transfer_params import read_source, write_source


class Arrival:
    """A sequence that is being loaded; see SequenceAgent.load(). If it is dropped, its load is cancelled.

    Attributes:
        tokens: how many
    """

    def __init__(self, agent: SequenceAgent, ticket: int, tokens: int) -> None:
        self._agent, self._ticket = agent, ticket
        self.tokens = tokens

    def __del__(self) -> None:
        # Not cancelled here, because a garbage collection may begin with any lock held.
        self._agent._dropped.append(self._ticket)

    def wait(self, timeout: float | None = None) -> NDArray[np.uint8]:
        """The state, for Context.restore() or write_slot(), once all of it is there. It is given once.

        Args:
            timeout: seconds; None: until the load has ended, which its deadline makes sure of

        Raises DeadlineError (not within `timeout`: the load goes on, and wait() may be called again),
        NotFoundError (it was given, or cancelled), ClosedError, and what a load has failed with.
        """
        return self._agent._state_of(self._ticket, self.tokens, timeout)

    def cancel(self) -> None:
        """Nobody wants it any more. Has no effect once wait() has returned."""
        self._agent._forget(self._ticket)


class SequenceAgent:
    """An agent for sequences of llama.cpp. Safe to use from several threads.

    A server that computes prompts saves a sequence and lends its state; another, of any engine, reads it by the
    parameters that lend() returns. A server that decodes gives parameters of any engine to load(), and restores
    a sequence from the state that has arrived.

    Close it, or leave its `with` block: until then its thread keeps it and its memory.

    Args:
        cache: how the contexts keep their sequences
        tokens: for which there is memory: of all sequences that are lent or arriving at the same time
        tokens_per_page: of a page; a sequence has whole pages
        sequences: for how many there is memory for the states of recurrent layers, lent or arriving
        name: the engine's; None: one of its own. Engines that meet have different names
        weights: a name of the weights; "": they are not compared. Engines with other names are refused
        groups: the layers of each group of the other engine, of models with sliding windows: `kvferry_groups`
            in its kv_transfer_params. None: those of the cache
        options: further ones of an Agent, such as listen, keys, allowed_keys, insecure, transport, verify, log

    Raises UnsupportedError (keys of an odd size that are interleaved), OutOfRangeError (a number below 1), and
    what Agent raises.
    """

    def __init__(
        self,
        cache: SequenceCache,
        tokens: int,
        *,
        tokens_per_page: int = 64,
        sequences: int = 8,
        name: str | None = None,
        weights: str = "",
        groups: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> None:
        if cache.interleaved and cache.key_size % 2:
            raise UnsupportedError(f"interleaved keys have {cache.key_size} elements; allowed: an even number")
        numbers = {"tokens": tokens, "tokens_per_page": tokens_per_page, "sequences": sequences}
        for what, number in numbers.items():
            if whole_number(number, what) < 1:
                raise OutOfRangeError(f"{what} is {number}; allowed: 1 and more")
        self.cache = cache
        self._weights = weights
        self._changed = threading.Condition()  # of all that follows
        self._used: dict[int, list[BlockTable]] = {}  # pages that are lent or being filled, or have arrived
        self._loads: dict[int, Event | None] = {}  # that somebody wants, and how they have ended
        self._dropped: deque[int] = deque()  # loads whose Arrival Python has dropped
        self._layers = [tuple(group) for group in (cache.groups if groups is None else groups)]
        model = cache.model(self._layers)
        self._sections = [cache.section(layers[0]) for layers in self._layers]
        specs = [
            GroupSpec(sequences, 1, "PL|BNH")
            if section.recurrent
            else GroupSpec(-(-tokens // tokens_per_page), tokens_per_page, "PL|BNH")
            for section in self._sections
        ]
        engine = Engine(
            model,
            groups=specs,
            name=name or f"llamacpp-{uuid.uuid4().hex}",
        )
        facts = {**cache.facts, **({"weights": weights} if weights else {})}
        self.agent = Agent(engine, convert=CONVERTED, facts=facts, **options)
        try:
            regions = self.agent.allocate_regions()
            self.agent.register(regions)
            self._pages = []
            for layers, section, spec in zip(self._layers, self._sections, specs, strict=True):
                count = len(section.parts) * len(layers)
                mine, regions = regions[:count], regions[count:]
                self._pages.append(Pages(section, layers, mine, spec.tokens_per_block))
        except BaseException:
            self.agent.close()
            raise
        self._thread = threading.Thread(target=self._take_events, name="kvferry-llamacpp", daemon=True)
        self._thread.start()

    def lend(self, state: State, *, uses: int = 1, lease: float | None = None) -> dict[str, Any]:
        """Lends the cache of a sequence; returns the kv_transfer_params by which others load it.

        The state is copied. The copy is kept until it has been loaded `uses` times, or nobody has given a sign
        of life for the time of the lease.

        Args:
            lease: seconds; None: the agent's

        Raises LimitError (not enough pages are free), and what SequenceCache.read() raises.
        """
        cells = self.cache.read(state)
        tokens = max(layer.first + len(layer.keys) for layer in cells)
        firsts = [cells[layers[0]].first for layers in self._layers]
        pages = self._take(firsts, tokens)
        request = uuid.uuid4()
        try:
            for here, table in zip(self._pages, pages, strict=True):
                here.write(table, cells)
            with self._changed:
                steps = self._steps(pages, firsts, tokens)
                ticket = self.agent.hold(request.bytes, steps, consumers=uses, lease=lease)
                self._used[ticket] = pages
        except BaseException:
            self._give(pages)
            raise
        contact = self.agent.contact
        source = TransferParams(
            contact.engine, request.bytes, contact.endpoint, contact.public_key or "", tokens
        )
        return {
            **write_source(source, request.hex, self._weights, self._layers),
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [],
            "tp_size": 1,
        }

    def load(
        self, params: Mapping[str, Any], tokens: int | None = None, *, deadline: float | None = None
    ) -> Arrival:
        """Begins to load what another engine has lent.

        Args:
            params: kv_transfer_params, of a server of llama.cpp, of vLLM with kvferry's connector, or of
                another engine whose adapter writes them
            tokens: how many, from the first. A server that goes on with the last token of a prompt needs all
                but that one. None: all that there are, as it must be if layers are recurrent
            deadline: seconds; None: 120

        Raises InvalidError (parameters), MismatchError (other weights), UnsupportedError (a push), LimitError
        (not enough pages are free). What goes wrong later, wait() raises.
        """
        source = self._source(params)
        wanted = source.tokens if tokens is None else tokens
        if not 1 <= wanted <= (source.tokens or wanted):
            raise InvalidError(
                f"tokens is {tokens}; allowed: 1 to remote_num_tokens, which is {source.tokens or 'not given'}"
            )
        if self.cache.states and wanted != source.tokens:
            raise InvalidError(
                f"tokens is {wanted}; allowed: remote_num_tokens, which is {source.tokens or 'not given'}, as "
                "the states of recurrent layers have all of these tokens"
            )
        return Arrival(self, self._pull(source, wanted, deadline), wanted)

    def decline(self, params: Mapping[str, Any], *, deadline: float | None = None) -> None:
        """Tells another engine that nothing of what it has lent is wanted, and waits until it knows.

        Raises what load() and Arrival.wait() raise.
        """
        self._state_of(self._pull(self._source(params), 0, deadline), 0, None)

    def _source(self, params: Mapping[str, Any]) -> TransferParams:
        source = read_source(params, self._weights)
        if source.push:
            raise UnsupportedError("transfer_mode is push; allowed: pull")
        return source

    def _pull(self, source: TransferParams, tokens: int, deadline: float | None) -> int:
        """Begins to read; returns the ticket."""
        contact = Contact(source.engine, source.endpoint, source.public_key or None)
        firsts = [section.first(tokens) for section in self._sections]
        pages = self._take(firsts, tokens)
        try:
            with self._changed:
                steps = self._steps(pages, firsts, tokens)
                ticket = self.agent.pull(source.id, contact, steps, deadline=deadline)
                self._used[ticket] = pages
                self._loads[ticket] = None
        except BaseException:
            self._give(pages)
            raise
        return ticket

    def _take(self, firsts: Sequence[int], end: int) -> list[BlockTable]:
        """Pages of all groups, or of none."""
        self._forget_dropped()
        taken: list[BlockTable] = []
        try:
            for pages, first in zip(self._pages, firsts, strict=True):
                taken.append(pages.take(first, end))
        except LimitError:
            self._give(taken)
            raise
        return taken

    def _steps(self, pages: Sequence[BlockTable], firsts: Sequence[int], end: int) -> list[GroupSteps]:
        """The steps of each group: tokens up to the same one, or a state, which has the first page."""
        return [
            GroupSteps(table.ids, 0, len(table.ids)) if section.recurrent else GroupSteps(table, first, end)
            for section, table, first in zip(self._sections, pages, firsts, strict=True)
        ]

    def _give(self, tables: Sequence[BlockTable]) -> None:
        """Gives back pages of the first groups, mostly all."""
        for pages, table in zip(self._pages, tables, strict=False):
            pages.give(table)

    def _state_of(self, ticket: int, tokens: int, timeout: float | None) -> NDArray[np.uint8]:
        """What Arrival.wait() returns."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self.agent.closed or self._loads.get(ticket, True), timeout)
            if self.agent.closed:
                raise ClosedError("the agent was closed")
            if not ended:
                raise DeadlineError(f"{tokens} tokens have not arrived within {timeout} s")
            event = self._loads.pop(ticket, None)
            if event is None:
                raise NotFoundError("the sequence was given, or its load cancelled")
            if event.error is not None:
                raise event.error
            pages = self._used.pop(ticket)
        try:
            if not tokens:
                return np.empty(0, np.uint8)
            state, cells = self.cache.make(tokens)
            for here, table in zip(self._pages, pages, strict=True):
                here.read(table, cells)
        finally:
            self._give(pages)
        return state

    def _forget(self, ticket: int) -> None:
        """What Arrival.cancel() does."""
        with self._changed:
            event = self._loads.pop(ticket, None)
            if event is not None and event.kind == EventKind.DONE:
                self._give(self._used.pop(ticket))
            self._changed.notify_all()
        cancel(self.agent, ticket)

    def _forget_dropped(self) -> None:
        """Cancels loads whose Arrival was dropped: their pages are free, or will be."""
        while self._dropped:
            try:
                ticket = self._dropped.popleft()
            except IndexError:  # another thread was faster
                return
            if ticket in self._loads:  # it was not given
                self._forget(ticket)

    def _take_events(self) -> None:
        """Notes what becomes of requests, until the agent is closed."""
        try:
            while True:
                event = self.agent.wait_event()
                if event is not None:
                    self._note(event)
                self._forget_dropped()
        except ClosedError:
            with self._changed:
                self._changed.notify_all()

    def _note(self, event: Event) -> None:
        with self._changed:
            wanted = event.ticket in self._loads
            if wanted and event.kind in (EventKind.DONE, EventKind.FAILED):
                self._loads[event.ticket] = event
                self._changed.notify_all()
            arrived = wanted and event.kind == EventKind.DONE
            if event.blocks_free and not arrived and event.ticket in self._used:
                self._give(self._used.pop(event.ticket))

    def close(self) -> None:
        """Ends everything under way; peers notice. Waiting threads get ClosedError. May be called again."""
        self.agent.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> SequenceAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
