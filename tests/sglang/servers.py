"""Starts SGLang's own servers, asks them for tokens, and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

BOOT_SECONDS = 600
ANSWER_SECONDS = 120
PORTS = 20000, 32000  # Linux gives those from 32768 on to those who ask for any
AMX = "intel_amx"  # see computing.py
HERE = pathlib.Path(__file__).resolve().parent


class Refused(Exception):
    """A server has answered with an error."""


@dataclass(frozen=True)
class Side:
    """How one server is started.

    Attributes:
        draft: name of the draft model, which drafts chains of three tokens; "": none
        attention: SGLang's name of what computes attention
    """

    tp: int = 1
    pp: int = 1
    page: int = 1
    draft: str = ""
    attention: str = "torch_native"
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def free_port() -> int:
    """A port that nobody listens on, and that nobody gets who asks for any: it is used much later."""
    while True:
        port = random.randrange(*PORTS)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


@dataclass
class Server:
    """One running server.

    Attributes:
        mode: prefill or decode
        bootstrap: port of the prefill server's bootstrap server
        readout: where the ranks write what they move
    """

    model: pathlib.Path
    side: Side
    mode: str
    bootstrap: int
    log: pathlib.Path
    readout: pathlib.Path
    environment: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Starts the server; ready() waits until it can answer."""
        self.port = free_port()
        command = [sys.executable, str(HERE / "server.py"), "--model-path", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--nccl-port", str(free_port())]
        command += ["--skip-tokenizer-init", "--dtype", "float32", "--device", "cpu"]
        command += ["--disable-overlap-schedule", "--skip-server-warmup"]
        command += ["--attention-backend", AMX if self.side.draft else self.side.attention]
        command += [
            "--mem-fraction-static",
            "0.3",
            "--max-total-tokens",
            "8192",
            "--max-running-requests",
            "16",
        ]
        command += ["--tp-size", str(self.side.tp), "--pp-size", str(self.side.pp)]
        command += ["--page-size", str(self.side.page)]
        if self.side.draft:
            command += ["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"]
            command += ["--speculative-draft-model-path", str(self.model.parent / self.side.draft)]
            command += ["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"]
        command += ["--disaggregation-mode", self.mode, "--disaggregation-transfer-backend", "kvferry"]
        command += ["--disaggregation-bootstrap-port", str(self.bootstrap)]
        # Its default keeps what it takes back in pinned memory, which needs a driver.
        command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        settings = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
            "SGLANG_NCCL_SO_PATH": "/nonexistent",  # the one that comes with torch wants a driver
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
                str(i % (os.cpu_count() or 1)) for i in range(self.side.tp * self.side.pp)
            ),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "KVFERRY_TEST_READOUT": str(self.readout),
            "PYTHONPATH": os.pathsep.join([str(HERE / "stand_ins"), str(HERE)]),
        }
        self._output = self.log.open("ab")
        self._process = subprocess.Popen(
            command + list(self.side.arguments),
            env={**os.environ, **settings, **dict(self.side.environment), **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            process_group=0,  # so that it can be ended as a whole; no session: see tests/vllm/servers.py
        )

    def ready(self) -> None:
        """Waits until the server answers."""
        until = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}; see {self.log}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            time.sleep(0.5)
        raise RuntimeError(f"the server did not answer within {BOOT_SECONDS} s; see {self.log}")

    def ask(self, prompt: list[int], tokens: int, room: int, **more: Any) -> dict[str, Any]:
        """Greedy tokens for a prompt. Raises Refused."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap,
            "bootstrap_room": room,
            **more,
        }
        return self.post("/generate", body)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request. Raises Refused."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(f"{error.code} {error.read().decode(errors='replace')}") from None
        except OSError as error:  # the server has died
            raise Refused(str(error)) from None
        return json.loads(text) if text else None

    def said(self, what: str) -> bool:
        """Whether its log has a text."""
        return what in self.log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the server and its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the server; it may have ended before."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._output.close()
