"""Starts vLLM's own servers, asks them for tokens, and ends them."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

BOOT_SECONDS = 900
ANSWER_SECONDS = 300
LIKELIEST = 20  # tokens whose log-probabilities a server tells, the most that vLLM tells
MTP = "mtp"  # instead of a draft's name: the model's own layers for multi-token prediction
MEMORY = "memory_now_bytes"  # agents' statistic of this name, in what watching.py writes out
HERE = pathlib.Path(__file__).resolve().parent


@dataclass(frozen=True)
class Side:
    """How one server is started: vLLM's arguments and environment variables."""

    block_size: int | None = None  # None: vLLM chooses
    tp: int = 1
    pp: int = 1
    arguments: tuple[str, ...] = ()
    # : The model that proposes tokens, which lies beside the server's own; or MTP.
    draft: str = ""
    environment: tuple[tuple[str, str], ...] = ()


def greedy(prompt: list[int], tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
    """A request for `tokens` tokens, the most likely ones."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body if params is None else body | {"kv_transfer_params": params}


@dataclass
class Server:
    """One running server."""

    model: pathlib.Path
    dtype: str
    side: Side
    role: str
    port: int
    log: pathlib.Path
    environment: dict[str, str] = field(default_factory=dict)
    # : Class and module; no module: the class is vLLM's own. None: the server has no connector.
    connector: tuple[str, str | None] | None = ("KvferryConnector", "kvferry.vllm")
    # : Further settings of --kv-transfer-config; they override those in start().
    transfer: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        """Starts the server; ready() waits until it can answer."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", "tiny", "--dtype", self.dtype]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "1024"]
        command += ["--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching"]
        command += ["-tp", str(self.side.tp), "-pp", str(self.side.pp)]
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(self._transfer(*self.connector))]
        if self.side.draft:
            command += ["--speculative-config", json.dumps(self._speculation())]
        if self.side.block_size is not None:
            command += ["--block-size", str(self.side.block_size)]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
        }
        self._output = self.log.open("wb")
        self._process = subprocess.Popen(
            command + list(self.side.arguments),
            env={**os.environ, **settings, **dict(self.side.environment), **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            # A process group, so that it can be ended as a whole, but no new session: Linux schedules sessions
            # as groups, and vLLM's processes wait by yielding, which gives way only to processes of the same
            # session. Two servers in separate sessions on one core would block each other, at times for
            # seconds.
            process_group=0,
        )

    def _transfer(self, name: str, module: str | None) -> dict[str, Any]:
        """How caches are transferred."""
        return {
            "kv_connector": name,
            "kv_role": self.role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": 120, "kv_load_deadline": 20},
            **({"kv_connector_module_path": module} if module is not None else {}),
            **self.transfer,
        }

    def _speculation(self) -> dict[str, Any]:
        """How tokens are proposed."""
        if self.side.draft == MTP:
            return {"method": MTP, "num_speculative_tokens": 3}
        return {
            "model": str(self.model.parent / self.side.draft),
            "method": "eagle" if self.side.draft.endswith("_eagle") else "draft_model",
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": self.side.tp,
        }

    def ready(self) -> None:
        """Waits until the server answers."""
        until = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}; see {self.log}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"the server did not answer within {BOOT_SECONDS} s; see {self.log}")

    def ask(
        self,
        prompt: list[int],
        tokens: int,
        params: dict[str, Any] | None = None,
        timeout: float = ANSWER_SECONDS,
        salt: str | None = None,
    ) -> dict[str, Any]:
        """Greedy tokens for a prompt. In a prefix cache a request finds only blocks with its own salt."""
        body = greedy(prompt, tokens, params) | {"logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
        if salt is not None:
            body["cache_salt"] = salt
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def loaded_tokens(self) -> int:
        """Tokens whose cache came from another engine, as vLLM counts them."""
        return self.counter("vllm:external_prefix_cache_hits_total")

    def counter(self, name: str) -> int:
        """A counter of vLLM's metrics; 0 if there is none."""
        return int(self.metric(name))

    def metric(self, name: str) -> float:
        """A value of vLLM's metrics, the sum over the server's replicas; 0 if there is none."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the server and its workers."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process.poll() is None

    @property
    def group(self) -> int:
        """The process group of the server and its workers."""
        return self._process.pid

    def stop(self) -> None:
        """Ends the server; it may have ended before."""
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._output.close()
