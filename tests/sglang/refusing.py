"""Servers that do not fit: each request is refused, the log says why by name, and both servers live on."""

from __future__ import annotations

import json

from handing import TOKENS, Judged
from servers import Refused

import kvferry


class Misfit(Judged):
    """Two servers that cannot work together."""

    SAYS: tuple[str, ...] = ()  # one of these, as one server or the other finds it first

    def run(self) -> None:
        """Asks and judges."""
        for i in range(2):
            try:
                found = self.pair.hand_over(self.prompt(50), TOKENS)
                self.judge(f"request {i} is refused", False, found)
            except Refused as why:
                says = any(reason in str(why) for reason in self.SAYS)
                self.judge(f"request {i} is refused, and the answer says why", says, why)
        said = any(self.pair.decode.said(reason) for reason in self.SAYS)
        self.judge("the decode server's log says why", said)
        for server in (self.pair.prefill, self.pair.decode):
            self.judge(f"the {server.mode} server lives on", server.is_running)


class Mismatch(Misfit):
    """The decode server's model has fewer layers, or there is a draft model in the prefill server only."""

    SAYS = ("layers", "equal models and draft models")


class Stages(Misfit):
    """The decode server has pipeline stages, and the prefill server none: SGLang itself refuses that."""

    SAYS = ("should be equal to prefill pp size",)


class WrongKey(Judged):
    """A decode server whose key the prefill server does not allow."""

    SAYS = "does not allow this end's key"

    def run(self) -> None:
        """Asks with the right key, then with another."""
        self.hand_over("with an allowed key", self.prompt(50))
        self.pair.decode.stop()
        other = kvferry.make_keys()
        file = self.pair.readout / "decode.keys"
        file.write_text(json.dumps(other._asdict()))
        self.pair.decode.start()
        self.pair.decode.ready()
        try:
            found = self.pair.hand_over(self.prompt(50), TOKENS)
            self.judge("with another key the request is refused", False, found)
        except Refused as why:
            self.judge(
                "with another key the request is refused, and the answer says why", self.SAYS in str(why), why
            )
        for server in (self.pair.prefill, self.pair.decode):
            self.judge(f"the {server.mode} server lives on", server.is_running)
