"""What vLLM's CPU build cannot run: a server that is asked for it ends at its start, with a sentence of vLLM's.

When one of these starts, what was tested without servers can become a case.
"""

from __future__ import annotations

from asking import Judge
from pair import Pair
from servers import Server, Side

LATENT = ("--attention-backend", "CPU_MLA")
# : Model, how the server is started, and the sentence.
REFUSED = {
    "sleep mode": (
        "llama",
        Side(64, arguments=("--enable-sleep-mode",)),
        "Sleep mode is not supported on current platform.",
    ),
    "decode context parallelism": (
        "deepseek",
        Side(tp=2, arguments=(*LATENT, "-dcp", "2")),
        "Decode Context Parallelism (DCP) requires attention implementations to return the softmax LSE during "
        "decode, but CPUMLAImpl does not.",
    ),
    "prefill context parallelism": (
        "deepseek",
        Side(arguments=(*LATENT, "-pcp", "2")),
        "Model Runner V1 does not support: prefill context parallel",
    ),
}


class Refusing:
    """Starts all of them."""

    def __init__(self, judge: Judge, pair: Pair) -> None:
        self._judge, self._pair = judge, pair

    def run(self) -> None:
        """Starts the servers at the same time, and waits for their ends."""
        servers = []
        try:
            for number, (model, side, _) in enumerate(REFUSED.values()):
                server = self._pair.server("kv_producer", side, self._pair.port + 2 * number, model=model)
                server.start()
                servers.append(server)
            for (what, (_, _, sentence)), server in zip(REFUSED.items(), servers, strict=True):
                self._judge_end(what, sentence, server)
        finally:
            for server in servers:
                server.stop()

    def _judge_end(self, what: str, sentence: str, server: Server) -> None:
        try:
            server.ready()
            ended = False
        except RuntimeError:
            ended = True
        says = sentence in server.log.read_text(errors="replace")
        self._judge(self._pair.name, f"{what}: vLLM says: {sentence}", ended and says, str(server.log))
