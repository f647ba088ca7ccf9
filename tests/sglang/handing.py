"""What a request through both servers must give: the model's own tokens, and equal cells on both sides."""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from models import VOCABULARY
from pair import ROOMS, Asking, Pair, Reference
from probing import STATES

TOKENS = 24
LENGTHS = (5, 16, 17, 100, 511)
CROWD = 12
DRAFTED = 8
Judge = Callable[..., None]


class Judged:
    """A case that asks for tokens."""

    def __init__(self, judge: Judge, pair: Pair) -> None:
        self.pair = pair
        self._judge = judge
        self._reference = Reference(pair.prefill.model)
        self._draw = random.Random(pair.name)

    def judge(self, what: str, good: bool, detail: Any = "") -> None:
        """Records one judgement."""
        self._judge(self.pair.name, what, bool(good), str(detail))

    def prompt(self, length: int) -> list[int]:
        """A prompt that no other is like."""
        return [self._draw.randrange(3, VOCABULARY) for _ in range(length)]

    def wanted(self, prompt: list[int]) -> list[int]:
        """The model's own tokens."""
        return self._reference.tokens(prompt, TOKENS)

    def hand_over(self, what: str, prompt: list[int]) -> int:
        """Judges the tokens of a request through both servers. Returns its room."""
        room = secrets.randbelow(ROOMS) + 1
        found, wanted = self.pair.hand_over(prompt, TOKENS, room), self.wanted(prompt)
        self.judge(f"{what}: the model's own tokens", found == wanted, f"{found} {wanted}")
        return room

    def cells_equal(self, room: int, length: int) -> bool:
        """Whether both sides have the same cells of a request."""
        both = [self.pair.cells(mode, room, length) for mode in ("prefill", "decode")]
        return all(itertools.starmap(np.array_equal, zip(*both, strict=True)))


class HandOver(Judged):
    """Prompts of several lengths, many at once, and a control."""

    def run(self) -> None:
        """Asks and judges."""
        for length in LENGTHS:
            room = self.hand_over(f"{length} tokens", self.prompt(length))
            self.judge(f"{length} tokens: all cells equal", self.cells_equal(room, length))
        self._crowd()
        self._control("cache")
        if self.pair.case.states:
            self._control("cache of attention", "kv")
            self._control("state", STATES)

    def _crowd(self) -> None:
        """Many requests at once."""
        asked = []
        for _ in range(CROWD):
            prompt, room = self.prompt(self._draw.choice(LENGTHS)), secrets.randbelow(ROOMS) + 1
            both = [Asking(server, prompt, TOKENS, room) for server in (self.pair.prefill, self.pair.decode)]
            for one in both:
                one.start()
            asked.append((prompt, both[1]))
        right = sum(one.tokens() == self.wanted(prompt) for prompt, one in asked)
        self.judge(f"{CROWD} requests at once: the model's own tokens", right == CROWD, f"{right} right")

    def _control(self, what: str, component: str = "") -> None:
        """What is lost on the way must be noticed by the judgements above."""
        prompt = self.prompt(100)
        room = secrets.randbelow(ROOMS) + 1
        with self.pair.spoiled(component):
            found = self.pair.hand_over(prompt, TOKENS, room)
        wanted = self.wanted(prompt)
        noticed = found[0] == wanted[0] and found != wanted
        self.judge(f"control: a lost {what} gives other tokens", noticed, found)
        self.judge(f"control: a lost {what} has other cells", not self.cells_equal(room, len(prompt)))


class Drafts(HandOver):
    """Both servers have a draft model, whose cache moves, too."""

    def run(self) -> None:
        """Asks and judges."""
        super().run()
        prompts = [self.prompt(200) for _ in range(DRAFTED)]
        good = self._accepted("drafts", prompts)
        self.judge("most drafts are accepted", good > 0.6, good)
        with self.pair.spoiled("draft"):
            bad = self._accepted("a lost cache of drafts", prompts)
        self.judge("control: a lost cache of drafts gives worse ones", bad < good / 2, f"{bad} and {good}")

    def _accepted(self, what: str, prompts: list[list[int]]) -> float:
        """The share of drafts that are what the model gives; judges the tokens."""
        answers = [self.pair.ask(prompt, TOKENS) for prompt in prompts]
        right = sum(
            answer["output_ids"] == self.wanted(prompt) for answer, prompt in zip(answers, prompts, strict=True)
        )
        self.judge(f"{what}: the model's own tokens", right == len(prompts), f"{right} right")
        told = [answer["meta_info"] for answer in answers]
        drafted = sum(of["spec_num_proposed_drafts"] for of in told)
        return float(sum(of["spec_num_correct_drafts"] for of in told) / drafted)


class Prefixes(Judged):
    """The decode server has a cache of prefixes: only what it lacks moves."""

    def run(self) -> None:
        """Asks and judges."""
        page = self.pair.case.decode.page
        prompt = self.prompt(200)
        self.hand_over("a new prompt", prompt)
        longer = prompt + self.prompt(77)
        room = self.hand_over("a prompt that begins likewise", longer)
        moved = len(self.pair.pages("decode", room))
        most = -(-len(longer) // page) - (len(prompt) - 1) // page
        self.judge("only what is missing moves", 0 < moved <= most, f"{moved} pages, {most} are missing")
        for again in (longer, prompt[: 12 * page]):  # the decode server has all of the second one
            what = f"{len(again)} tokens again"
            room = self.hand_over(what, again)
            moved, missing = len(self.pair.pages("decode", room)), 1
            if self.pair.case.states:  # SGLang keeps those of whole prompts: none of the second one
                missing = len(longer) - len(prompt) if again is longer else len(again)
            self.judge(f"{what}: what is missing moves", moved == missing, f"{moved} pages, not {missing}")
