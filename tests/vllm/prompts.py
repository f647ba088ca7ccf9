"""Prompts of all lengths through two servers: tokens, bytes, counters, and controls that must notice
differences.

Every prompt goes:

    to the decode server alone, and to the prefill server alone: do they agree without any transfer?
    to the decode server alone, longer by the first token of its answer: do its steps agree with its prefill?
    through both: this answer and these cells are judged
    to the decode server with other tokens before the same last one: this must give another answer
    through both with one corrupted block: the cells must differ, and the answer too for at least one prompt

vLLM's own counters must say that the cache was loaded rather than computed. One of the prompts with other
tokens also goes through both: its cells must be other ones, and the same on both sides.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cases import CHANNELS_FIRST, Case, Tokens
from cells import (
    Cells,
    ReplicasDiffer,
    cache_count,
    channels_first,
    converted_cells,
    expected_cells,
    is_draft,
    is_empty,
    read_cells,
)
from pair import Answer, Pair, answer
from servers import MTP

NEW_TOKENS = 12
LENGTHS = (5, 64, 100, 193, 300)
SHORT_LENGTHS = (64, 193)
# If the servers' types differ: how many times farther from the decode server's own log-probabilities those of a
# hand-over may be than the prefill server's own.
CONVERTED_DISTANCE = 1.5
Judge = Callable[..., None]


class HandOver:
    """Runs one case."""

    def __init__(self, judge: Judge, pair: Pair, lengths: Sequence[int] = LENGTHS) -> None:
        self._judge, self._pair, self._lengths = judge, pair, lengths
        self._case: Case = pair.case
        self._name = pair.name
        self._config = self._read_config(pair.case.model)
        self._same_draft = pair.case.prefill.draft == pair.case.decode.draft
        self._agreed = self._equal = self._repeated = 0
        self._farthest = self._apart = self._behind = 0.0
        self._proposed = {"alone": [0, 0], "after the transfer": [0, 0]}
        self._loads = 0
        self._answers_changed = dict.fromkeys(["attention", "state"][: 1 + pair.case.has_state], False)

    def run(self) -> None:
        """Runs all prompts."""
        chance = random.Random(3)
        for length in self._lengths:
            prompt = [chance.randrange(3, 500) for _ in range(length)]
            other = [chance.randrange(3, 500) for _ in range(length - 1)] + prompt[-1:]
            self._ask(prompt, other)
        for what, changed in self._answers_changed.items():
            self._judge(self._name, f"a corrupted block ({what}) changes an answer", changed)
        if self._case.converts and self._case.tokens is not Tokens.NOTHING:
            self._judge_distance()
        if self._case.has_state:
            self._judge_orders()
        counted, wanted = (
            self._pair.decode.counter("vllm:kvferry_loads_total"),
            self._loads * self._case.decode.tp,
        )
        self._judge(
            self._name,
            "the metrics count every load of every rank",
            counted == wanted,
            f"{counted} of {wanted}",
        )
        self._judge_way()
        self._record(f"the two servers alone agree in {self._agreed} of {len(self._lengths)} prompts")
        self._record(
            "the decode server alone, given the first token that it gave, gives the same further ones in "
            f"{self._repeated} of {len(self._lengths)} prompts"
        )
        self._record(
            f"after the transfer {self._equal} of {len(self._lengths)} prompts have all tokens that the decode "
            f"server computes alone; log-probabilities of first tokens differ by up to {self._farthest:.4f}"
        )
        if self._case.decode.draft:
            self._judge_draft()

    def _judge_draft(self) -> None:
        """Judges whether the draft proposed tokens, and, if it is the model itself, whether they were good.

        vLLM pads the first step after a load with proposals that are always rejected.
        """
        for what, (proposed, accepted) in self._proposed.items():
            self._record(f"{what}: {accepted} of {proposed} proposed tokens were accepted")
        proposed, accepted = self._proposed["after the transfer"]
        self._judge(self._name, "the draft proposed tokens after the transfer", proposed > 0)
        if self._same_draft and self._case.decode.draft == self._case.model:
            alone = self._proposed["alone"][1]
            detail = f"{accepted}, alone {alone}"
            what = "as many of a model's own proposals were accepted as without a transfer"
            self._judge(self._name, what, 0 < accepted == alone, detail)

    def _count_proposed(self, what: str, ask: Callable[[], Answer]) -> Answer:
        """Asks the decode server, and adds up the tokens that its draft proposes and that it accepts."""
        if not self._case.decode.draft:
            return ask()
        names = [f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")]
        before = [self._pair.decode.counter(name) for name in names]
        found = ask()
        for at, name in enumerate(names):
            self._proposed[what][at] += self._pair.decode.counter(name) - before[at]
        return found

    def _read_config(self, model: str, draft: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._pair.folder / model / "config.json").read_text())
        if draft == MTP:
            return found | {"draft": found | {"num_hidden_layers": found["num_nextn_predict_layers"]}}
        return found | {"draft": self._read_config(draft)} if draft else found

    def _record(self, what: str) -> None:
        print(f"record {self._name}: {what}", flush=True)

    def _ask(self, prompt: list[int], other: list[int]) -> None:
        pair, length = self._pair, len(prompt)
        what = f"{length} tokens"
        alone = self._count_proposed("alone", lambda: answer(pair.decode.ask(prompt, NEW_TOKENS)))
        there = answer(pair.prefill.ask(prompt, NEW_TOKENS))
        again = answer(pair.decode.ask(prompt + alone.tokens[:1], NEW_TOKENS - 1))
        before = pair.decode.loaded_tokens()
        through = self._count_proposed("after the transfer", lambda: self._through(prompt))
        loaded = pair.decode.loaded_tokens() - before
        wanted = length - self._case.has_state
        self._judge(self._name, f"{what}: all were loaded", loaded == wanted, f"{loaded} of {wanted}")
        self._agreed += alone.tokens == there.tokens
        self._repeated += alone.tokens[1:] == again.tokens
        self._equal += alone.tokens == through.tokens
        self._farthest = max(self._farthest, alone.farthest(through))
        self._apart = max(self._apart, alone.farthest(there))
        self._behind = max(self._behind, alone.behind(through))
        self._judge_tokens(what, through, alone)
        good = self._judge_cells(what, wanted)
        if length > 2:
            differs = answer(pair.decode.ask(other, NEW_TOKENS)).tokens != alone.tokens
            self._judge(self._name, f"{what}: another prompt differs", differs)
        for corrupted in self._answers_changed:
            pair.corrupt.write_text(corrupted)
            changed = self._through(prompt).tokens != through.tokens
            pair.corrupt.unlink()
            self._answers_changed[corrupted] |= changed
            noticed = self._cells("kv_consumer", wanted) != good
            self._judge(self._name, f"{what}: a corrupted block ({corrupted}) has other bytes", noticed)
        if length == max(self._lengths):
            self._through(other)
            cells = self._judge_cells(f"{what}, another prompt", wanted)
            self._judge(self._name, f"{what}, another prompt: other bytes", cells != good)

    def _through(self, prompt: list[int]) -> Answer:
        found = self._pair.through(prompt, NEW_TOKENS)
        self._pair.wait_for_readout()
        self._loads += 1
        return found

    def _judge_tokens(self, what: str, through: Answer, alone: Answer) -> None:
        if self._case.tokens is Tokens.ALL:
            detail = f"{through.tokens} not {alone.tokens}"
            self._judge(self._name, f"{what}: same tokens", through.tokens == alone.tokens, detail)
        elif self._case.tokens is Tokens.FIRST and not self._case.converts:
            off = abs(through.first - alone.first)
            good = through.tokens[0] == alone.tokens[0] and off <= self._case.tolerance
            limit = f" to within {self._case.tolerance}"
            self._judge(self._name, f"{what}: same first token{limit}", good, f"off by {off}")

    def _judge_distance(self) -> None:
        """What may come first may be about as far off as at the prefill server, which has the other type."""
        limit = CONVERTED_DISTANCE * self._apart
        self._record(
            f"log-probabilities of first tokens lie up to {self._farthest:.4f} off, the prefill server's own "
            f"{self._apart:.4f}; the first tokens are up to {self._behind:.4f} less likely than the likeliest"
        )
        self._judge(
            self._name,
            "the log-probabilities of what may come first lie about as far off as the prefill server's own",
            0 < self._farthest <= limit,
            f"{self._farthest} off, the prefill server's {self._apart}",
        )
        self._judge(
            self._name,
            "the first tokens are the decode server's own, or as likely to it as such distances allow",
            self._behind <= 2 * limit,  # one token may seem less likely by so much, and another more
            f"{self._behind} less likely, with a limit of {2 * limit}",
        )

    def _judge_way(self) -> None:
        """Judges whether bytes went the way that the case names, by the counters of the side that moves
        them."""
        if self._case.move == "auto":
            return
        mover = self._pair.prefill if self._case.mode == "push" else self._pair.decode
        moved = mover.counter("vllm:kvferry_bytes_total") + mover.counter("vllm:kvferry_written_bytes_total")
        packed = mover.counter("vllm:kvferry_packed_bytes_total")
        wanted = moved if self._case.move == "packed" else 0
        detail = f"{packed} of {moved} bytes went packed"
        self._judge(self._name, f"all bytes went {self._case.move}", moved > 0 and packed == wanted, detail)

    def _judge_orders(self) -> None:
        """Judges whether the servers keep convolutions in the requested order."""
        for role, side in (("kv_producer", self._case.prefill), ("kv_consumer", self._case.decode)):
            layers = torch.load(self._pair.readout / f"{role}.0.pt")["layers"].values()
            found = {channels_first(layer, self._config) for layer in layers if layer["states"] is not None}
            wanted = side.environment == CHANNELS_FIRST
            what = f"{role}: convolutions have {'channels' if wanted else 'steps'} outermost"
            self._judge(self._name, what, found == {wanted})

    def _cells(self, role: str, tokens: int) -> Cells:
        side = self._case.prefill if role == "kv_producer" else self._case.decode
        config = self._read_config(self._case.model, side.draft)
        found = read_cells(self._pair.readout, role, side.tp, config, tokens)
        if self._same_draft:
            return found
        return {cell: content for cell, content in found.items() if not is_draft(config, cell[0])}

    def _judge_cells(self, what: str, tokens: int) -> Cells:
        """Compares the cells of both sides; returns those of the decode server."""
        try:
            there, here = self._cells("kv_producer", tokens), self._cells("kv_consumer", tokens)
            if self._case.converts:
                there = converted_cells(there, *self._case.cache_types)
        except (ReplicasDiffer, KeyError, AssertionError) as error:
            self._judge(
                self._name, f"{what}: the cells of both sides", False, f"{type(error).__name__}: {error}"
            )
            return {}
        layers = {cell[0] for cell in here}
        states = {cell[0] for cell in here if cell[1].startswith("conv ")}
        draft = self._case.decode.draft if self._same_draft else ""
        config = self._read_config(self._case.model, draft)
        complete = len(layers) == sum(cache_count(model) for model in (config, config.get("draft")) if model)
        complete &= here.keys() == there.keys() == expected_cells(config, layers, states)
        filled = {cell[0] for cell, content in there.items() if any(content)}
        complete &= filled == {layer for layer in layers if not is_empty(config, layer, tokens)}
        self._judge(
            self._name,
            f"{what}: all cells of {len(layers)} layers are there",
            complete,
            f"nothing but zeros in {sorted(layers - filled)}",
        )
        differing = [cell for cell in here if here[cell] != there.get(cell)]
        total = sum(map(len, here.values()))
        self._judge(
            self._name,
            f"{what}: same bytes, {total} in {len(here)} rows of cells",
            bool(here) and not differing,
            f"{len(differing)} rows differ, such as {differing[:3]}",
        )
        return here
