"""The two servers of a case."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from cases import Case, What
from proxies import RunningProxy
from servers import MEMORY, Server, Side

import kvferry
from kvferry.vllm.proxy_servers import OF_REQUEST

PLAIN = ("KvferryConnector", "kvferry.vllm")
WATCHING = ("WatchingConnector", "watching")
PROBING = ("ProbingConnector", "probing")
BESIDE = ("MultiConnector", None)
INTERRUPTING = ("InterruptingConnector", "interrupting")
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PROBE_SECONDS = 60
DRAIN_SECONDS = 60  # for a prefill server that ends while a peer is still to come
#: Seconds for which blocks are kept without a sign of life of their reader, and after which a load or a push
#: fails.
TIMES = (120, 20)
# Many of these are waited for, and must be over before nothing is left of a fault.
FAULT_TIMES = {
    What.FAULTS: (10, 6),
    What.MISMATCH: (10, 6),
    What.PROXY: (10, 6),
    What.COPYING: (20, 20),
    What.RETRIES: (20, 40),  # above the 30 s for which a load waits for a producer that has the request
}


@dataclass(frozen=True)
class Answer:
    """The tokens that a server generated."""

    tokens: list[int]
    first: float  # log-probability of the first token
    likely: dict[str, float]  # log-probabilities of the tokens that were likeliest in its place, and its own

    def farthest(self, other: Answer) -> float:
        """By how much the log-probabilities of what may come first differ, at most, where both tell them;
        infinite if they have no token in common."""
        both = self.likely.keys() & other.likely.keys()
        return max((abs(self.likely[token] - other.likely[token]) for token in both), default=math.inf)

    def behind(self, other: Answer) -> float:
        """How much less likely another answer's first token was here than the likeliest; infinite: not told."""
        return max(self.likely.values()) - self.likely.get(f"token_id:{other.tokens[0]}", -math.inf)


def answer(found: dict[str, Any]) -> Answer:
    """The answer in a server's response."""
    choice = found["choices"][0]
    likely = choice["logprobs"]
    return Answer(choice["token_ids"], likely["token_logprobs"][0], likely["top_logprobs"][0])


def engine_of(params: dict[str, Any]) -> dict[str, Any]:
    """What a prefill server's parameters say of the engine, whatever the request."""
    return {name: value for name, value in params.items() if name not in OF_REQUEST}


@dataclass
class Pair:
    """A prefill and a decode server, from before they start until they have ended."""

    folder: pathlib.Path  # for the models and logs
    name: str
    case: Case
    port: int  # the first of four; beside them one for the proxy, and one for events
    connector: tuple[str, str | None] = PROBING

    def __post_init__(self) -> None:
        self.readout = self.folder / f"{self.name}.readout"
        self.corrupt = self.folder / f"{self.name}.corrupt"
        self.interrupt = self.folder / f"{self.name}.interrupt"
        shutil.rmtree(self.readout, ignore_errors=True)
        self.readout.mkdir()
        self.corrupt.unlink(missing_ok=True)
        self.interrupt.unlink(missing_ok=True)
        self._settings: dict[str, Any] = {}
        roles = ("kv_both", "kv_both") if self.case.both else ("kv_producer", "kv_consumer")
        if self.case.what is What.ROLES:
            self._settings = self._keys()
        if self.case.what in (What.TURNS, What.PROXY_TURNS):
            self._settings = {"bidirectional_kv_xfer": True}
        if self.case.converts:
            self._settings = {"convert": True}
        if self.case.what is What.ENDING:
            self._settings = {
                "kv_drain_duration": DRAIN_SECONDS,
                "kv_load_patience": 10,
                "local_commands": True,
            }
        self.prefill = self.server(
            roles[0], self.case.prefill, self.port, dtype=self.case.prefill_dtype or self.case.dtype
        )
        self.decode = self.server(roles[1], self.case.decode, self.port + 1)
        self._servers = [] if self.case.what is What.REFUSED else [self.prefill, self.decode]
        self._engines: dict[int, dict[str, Any]] = {}  # by port: what a decode server must know of an engine

    def _keys(self) -> dict[str, Any]:
        """Settings with which servers of this case can talk only to each other."""
        keys = kvferry.make_keys()
        file = self.readout / "keys.json"
        file.touch(0o600)
        file.write_text(json.dumps(keys._asdict()))
        return {"key_file": str(file), "allowed_keys": [keys.public_key]}

    @property
    def events(self) -> str:
        """Where the decode server of a case with another connector sends vLLM's events."""
        return f"tcp://127.0.0.1:{self.port + 5}"

    def beside(self, name: str) -> pathlib.Path:
        """Where the second connector of the prefill or the decode server keeps its files."""
        return self.readout / name

    def _both(self, role: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings with which vLLM's MultiConnector asks kvferry's connector first, then its example."""
        files = {"shared_storage_path": str(self.beside(name))}
        first = {
            "kv_connector": PLAIN[0],
            "kv_connector_module_path": PLAIN[1],
            "kv_role": role,
            "kv_connector_extra_config": settings,
        }
        second = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": files}
        return {"connectors": [first, second]}

    def server(self, role: str, side: Side, port: int, model: str = "", dtype: str = "") -> Server:
        """A server like those of the case, not started yet. Agents meet it at `port` + 2, or any port."""
        number = port - self.port
        name = ("prefill", "decode")[number % 2]
        lease, deadline = FAULT_TIMES.get(self.case.what, TIMES)
        settings = {
            "kv_lease_duration": lease,
            "kv_load_deadline": deadline,
            "transfer_mode": self.case.mode,
            "move": self.case.move,
            **self._settings,
        }
        if self.case.what is What.BESIDE:
            settings = self._both(role, name, settings)
            if name == "decode":
                said = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events}
                side = replace(side, arguments=(*side.arguments, "--kv-events-config", json.dumps(said)))
        return Server(
            model=self.folder / (model or self.case.model),
            dtype=dtype or self.case.dtype,
            side=side,
            role=role,
            port=port,
            log=self.folder / f"{self.name}.{name}{number // 2 or ''}.log",
            environment={
                "KVFERRY_READOUT": str(self.readout),
                "KVFERRY_CORRUPT": str(self.corrupt),
                "KVFERRY_INTERRUPT": str(self.interrupt),
                "KVFERRY_SIDE_CHANNEL_PORT": str(0 if self.case.what is What.REPLICAS else port + 2),
                "KVFERRY_LAYERS_EACH": str(int(self.case.at_once)),
            },
            connector=self.connector,
            transfer={"engine_id": f"{role}-{number}", "kv_connector_extra_config": settings},
        )

    def __enter__(self) -> Pair:
        try:
            for server in self._servers:
                server.start()
            for server in self._servers:
                server.ready()
            if self.case.at_once:
                self.learn(self.prefill)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in reversed(self._servers):
            server.stop()
        self.corrupt.unlink(missing_ok=True)
        shutil.rmtree(self.readout, ignore_errors=True)

    def params(self, prompt: list[int], prefill: Server | None = None) -> dict[str, Any]:
        """Lets the prefill server compute the prompt; returns the parameters that a proxy then passes on."""
        found: dict[str, Any] = (prefill or self.prefill).ask(prompt, 1, dict(TO_PREFILL))["kv_transfer_params"]
        return found

    def learn(self, prefill: Server) -> None:
        """Learns the engine from an answer, as a proxy does. Nobody loads what is kept for it."""
        prompt = [5, 6, 7]
        found = self.params(prompt, prefill)
        self._engines[prefill.port] = engine_of(found)
        prefill.ask(prompt, 1)  # a further step: all that is read out has been

    def hand_over(self, prompt: list[int], tokens: int) -> Answer:
        """Prefills on the prefill server and decodes on the decode server."""
        with self.begun(prompt) as params:
            return answer(self.decode.ask(prompt, tokens, params))

    @contextlib.contextmanager
    def begun(self, prompt: list[int], prefill: Server | None = None) -> Iterator[dict[str, Any]]:
        """Asks the prefill server; gives the parameters for the decode server, as a proxy has them.

        Where both are asked at once, the prefill server computes meanwhile, and must answer before the end.
        """
        prefill = prefill or self.prefill
        if not self.case.at_once:
            yield self.params(prompt, prefill)
            return
        to_prefill, to_decode = self.announced(prefill)
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(prefill.ask, prompt, 1, to_prefill)
            yield to_decode
            params = there.result()["kv_transfer_params"]
        assert params["kvferry_transfer_id"] == to_decode["kvferry_transfer_id"]

    def announced(self, prefill: Server) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters for the prefill and the decode server, if both are asked at once."""
        name = secrets.token_hex(16)
        to_decode = {
            **self._engines[prefill.port],
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": name,
            "kvferry_transfer_id": name,
        }
        return {**TO_PREFILL, "kvferry_transfer_id": name}, to_decode

    def proxy(self, *options: str) -> RunningProxy:
        """kvferry's proxy in front of both, not started yet."""
        log = self.folder / f"{self.name}.proxy.log"
        return RunningProxy(self.port + 4, [self.prefill], [self.decode], log, options)

    def kept(self, server: Server) -> dict[str, int]:
        """What the parts of a server kept in its last step, where its connector writes that out."""
        return {
            f"{part}: {name}": count
            for part, said in self._said_kept(server).items()
            for name, count in said.items()
            if count and name != MEMORY
        }

    def agent_memory(self, server: Server) -> int:
        """The bytes that its agents had allocated for peers then."""
        return sum(said.get(MEMORY, 0) for said in self._said_kept(server).values())

    def _said_kept(self, server: Server) -> dict[str, dict[str, int]]:
        files = sorted(self.readout.glob(f"{server.transfer['engine_id']}.*.kept"))
        if not files:
            raise RuntimeError(f"the connector of {server.log.stem} does not write out what it keeps")
        return {file.suffixes[0].removeprefix("."): json.loads(file.read_text()) for file in files}

    def through(self, prompt: list[int], tokens: int) -> Answer:
        """Like hand_over(), after deleting earlier readouts."""
        for old in self.readout.glob("*.pt"):
            old.unlink()
        return self.hand_over(prompt, tokens)

    def wait_for_readout(self) -> None:
        """Waits until every rank of both sides has written its readout of through()."""
        wanted = [f"kv_producer.{rank}.pt" for rank in range(self.case.prefill.tp)]
        wanted += [f"kv_consumer.{rank}.pt" for rank in range(self.case.decode.tp)]
        until = time.monotonic() + PROBE_SECONDS
        while missing := [name for name in wanted if not (self.readout / name).exists()]:
            if time.monotonic() > until:
                raise RuntimeError(f"nothing was read out into {', '.join(missing)}")
            time.sleep(0.01)
