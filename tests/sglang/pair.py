"""The two servers of a case, and what a request through both must give."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from cases import Case
from probing import SPOIL, STATES
from servers import Refused, Server, free_port

import kvferry

READOUT_SECONDS = 20
ROOMS = 2**62


@dataclass
class Pair:
    """A prefill and a decode server, from before they start until they have ended."""

    folder: pathlib.Path  # for the models and logs
    name: str
    case: Case

    def __post_init__(self) -> None:
        self.readout = self.folder / f"{self.name}.readout"
        shutil.rmtree(self.readout, ignore_errors=True)
        self.readout.mkdir(parents=True)
        self.sides = {"prefill": self.case.prefill, "decode": self.case.decode}
        self._keys = {mode: kvferry.make_keys() for mode in self.sides}
        bootstrap = free_port()
        self.prefill, self.decode = (self.server(mode, bootstrap) for mode in self.sides)

    def server(self, mode: str, bootstrap: int) -> Server:
        """A server of a mode, not started yet."""
        model = self.case.decode_model if mode == "decode" else ""
        log = self.folder / f"{self.name}.{mode}.log"
        log.unlink(missing_ok=True)
        environment = {
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(self.case.patience),
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(self.case.patience),
        }
        return Server(
            model=self.folder / (model or self.case.model),
            side=self.sides[mode],
            mode=mode,
            bootstrap=bootstrap,
            log=log,
            readout=self.readout,
            environment=environment | (self.keys(mode) if self.case.keys else {}),
        )

    def keys(self, mode: str) -> dict[str, str]:
        """Settings with which servers of this case can talk only to each other."""
        file = self.readout / f"{mode}.keys"
        file.touch(0o600)
        file.write_text(json.dumps(self._keys[mode]._asdict()))
        allowed = ",".join(keys.public_key for keys in self._keys.values())
        return {"KVFERRY_KEY_FILE": str(file), "KVFERRY_ALLOWED_KEYS": allowed}

    def __enter__(self) -> Pair:
        try:
            for server in (self.prefill, self.decode):
                server.start()
            for server in (self.prefill, self.decode):
                server.ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.decode, self.prefill):
            server.stop()
        shutil.rmtree(self.readout, ignore_errors=True)

    def hand_over(self, prompt: list[int], tokens: int, room: int = 0) -> list[int]:
        """Asks both servers at once, as a router does; returns the decode server's tokens. Raises Refused."""
        found: list[int] = self.ask(prompt, tokens, room)["output_ids"]
        return found

    def ask(self, prompt: list[int], tokens: int, room: int = 0) -> dict[str, Any]:
        """Likewise; returns the decode server's answer."""
        room = room or secrets.randbelow(ROOMS) + 1
        with Asking(self.prefill, prompt, tokens, room), Asking(self.decode, prompt, tokens, room) as asked:
            return asked.answer()

    @contextlib.contextmanager
    def spoiled(self, component: str = "") -> Iterator[None]:
        """Decode ranks lose what has arrived of a component, or of all."""
        (self.readout / SPOIL).write_text(component)
        yield
        (self.readout / SPOIL).unlink()

    def cells(self, mode: str, room: int, prompt_tokens: int) -> list[Any]:
        """What a server had of a request that has no prefix there: of each component and layer, keys and then
        values, or latents, an array [token][byte] of all ranks. Of a window it had the last tokens only. Of
        states: of each tensor and layer, an array [1][byte].
        """
        side = self.sides[mode]
        found: dict[tuple[str, int], list[Any]] = {}
        for stage in range(side.pp):
            for name, buffers in self._of_ranks(mode, room, stage).items():
                each = len(buffers) // (1 if self.case.latent else 2)
                for i, blocks in enumerate(buffers):
                    cells = blocks if name == STATES else self._tokens(blocks, side.page, prompt_tokens)
                    found.setdefault((name, i // each), []).append(cells)
        return [cells for key in sorted(found) for cells in found[key]]

    @staticmethod
    def _tokens(blocks: Any, page: int, prompt_tokens: int) -> Any:
        """The tokens in the last pages of a prompt."""
        first = (-(-prompt_tokens // page) - len(blocks)) * page
        return blocks.reshape(len(blocks) * page, -1)[: prompt_tokens - first]

    def _of_ranks(self, mode: str, room: int, stage: int) -> dict[str, list[Any]]:
        """The blocks of all components in each buffer, [block][token][byte], those of all ranks together. Of
        states: [1][byte].
        """
        page, count = self.sides[mode].page, self.sides[mode].tp
        ranks = [self._buffers(mode, room, stage, rank) for rank in range(count)]
        found: dict[str, list[Any]] = {}
        states = [key for key in ranks[0] if key.split()[0] == STATES]
        for i, key in enumerate(states):
            parts = self.case.states[i * len(self.case.states) // len(states)]
            found.setdefault(STATES, []).append(self._state([rank[key] for rank in ranks], parts))
        for key in (key for key in ranks[0] if key not in states):
            shares = [rank[key].reshape(len(rank[key]), page, -1) for rank in ranks]
            if self.case.latent:
                assert all(np.array_equal(share, shares[0]) for share in shares), "ranks have other latents"
                shares = shares[:1]
            found.setdefault(key.split()[0], []).append(np.concatenate(shares, axis=2))
        return found

    @staticmethod
    def _state(shares: list[Any], parts: tuple[int, ...]) -> Any:
        """One tensor of a state, [1][byte], of ranks each of which has a share of each part."""
        ends = [shares[0].shape[1] * end // sum(parts) for end in itertools.accumulate(parts)]
        pieces = [np.split(share, ends[:-1], axis=1) for share in shares]
        return np.concatenate([piece for part in zip(*pieces, strict=True) for piece in part], axis=1)

    def pages(self, mode: str, room: int) -> Any:
        """The pages of a request that moved, of the first buffer of the first rank."""
        return next(iter(self._buffers(mode, room, 0, 0).values()))

    def _buffers(self, mode: str, room: int, stage: int, rank: int) -> dict[str, Any]:
        file = self.readout / f"{mode}.{room}.{stage}.{rank}.npz"
        until = time.monotonic() + READOUT_SECONDS
        while not file.exists():
            if time.monotonic() > until:
                raise RuntimeError(f"nothing was read out into {file.name}")
            time.sleep(0.01)
        with np.load(file) as found:
            return {name: found[name] for name in found.files}


class Asking(threading.Thread):
    """A request to one server, in a thread of its own."""

    def __init__(self, server: Server, prompt: list[int], tokens: int, room: int, **more: Any) -> None:
        super().__init__(daemon=True)
        self._ask = lambda: server.ask(prompt, tokens, room, **more)
        self._found: dict[str, Any] | Refused = Refused("no answer")

    def run(self) -> None:
        """Asks."""
        try:
            self._found = self._ask()
        except Refused as why:
            self._found = why

    def __enter__(self) -> Asking:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def answer(self) -> dict[str, Any]:
        """The answer, when it is there. Raises Refused."""
        self.join()
        if isinstance(self._found, Refused):
            raise self._found
        return self._found

    def tokens(self) -> list[int]:
        """Its tokens."""
        found: list[int] = self.answer()["output_ids"]
        return found


class Reference:
    """What the model itself generates: transformers, greedily."""

    def __init__(self, model: pathlib.Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def tokens(self, prompt: list[int], tokens: int) -> list[int]:
        """The tokens that follow a prompt."""
        found: list[int] = []
        more, cache = torch.tensor([prompt]), None
        with torch.no_grad():
            for _ in range(tokens):  # generate() would leave out the token that ends a sequence
                out = self._model(more, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                more = out.logits[:, -1:].argmax(-1)
                found.append(int(more))
        return found
