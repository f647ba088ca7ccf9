"""Runs kvferry's proxy in front of servers."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from servers import ANSWER_SECONDS, Server, greedy

WAIT_SECONDS = 60


class RunningProxy:
    """The proxy in a process of its own, as a context manager."""

    def __init__(
        self,
        port: int,
        prefill: Sequence[Server],
        decode: Sequence[Server],
        log: pathlib.Path,
        options: Sequence[str] = (),
    ) -> None:
        self.port = port
        urls = [[f"http://127.0.0.1:{server.port}" for server in servers] for servers in (prefill, decode)]
        self._command = [sys.executable, "-m", "kvferry.vllm.proxy", "--port", str(port)]
        self._command += ["--prefill", *urls[0], "--decode", *urls[1], *options]
        self._log = log
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> RunningProxy:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        if not wait_for(lambda: self._process.poll() is not None or bool(self.ask("/health"))):
            self.__exit__()
            raise RuntimeError(f"the proxy did not answer within {WAIT_SECONDS} s; see {self._log}")
        if self._process.poll() is not None:
            raise RuntimeError(f"the proxy ended with {self._process.returncode}; see {self._log}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def group(self) -> int:
        """The process group of its own that it has."""
        return self._process.pid

    def tokens(self, prompt: list[int], count: int, stream: bool = False) -> list[int]:
        """Greedy tokens for a prompt; raises OSError."""
        body = greedy(prompt, count, None)
        if not stream:
            return list(json.loads(self.ask("/v1/completions", body))["choices"][0]["token_ids"])
        events = self.events(body)
        return [token for event in events for token in event["choices"][0].get("token_ids") or []]

    def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of the streamed answer to a completion; raises OSError."""
        found = self.ask("/v1/completions", {**body, "stream": True}).decode()
        return [json.loads(event) for event in re.findall(r"^data: (\{.*)$", found, re.M)]

    def kill(self) -> None:
        """Ends it at once; nobody who waits for it is told."""
        self._process.send_signal(signal.SIGKILL)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """What it answers; raises OSError."""
        with self.open(path, body) as found:
            content: bytes = found.read()
            return content

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """An answer that has begun; raises OSError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=ANSWER_SECONDS)


def wait_for(condition: Callable[[], bool]) -> bool:
    """Waits until something holds; an OSError says that it does not yet. Returns whether it did in time."""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        try:
            if condition():
                return True
        except OSError:
            pass
        time.sleep(0.05)
    return False
