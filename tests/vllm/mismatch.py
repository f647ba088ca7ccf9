"""A prefill server with another model, or another cache type, is refused by the name of the field."""

from __future__ import annotations

from asking import Asking
from cases import FP8

#: Model and type of the prefill server, and what the decode server's log must say.
OTHERS = {
    "heads of another size": ("llama_heads", "float32", r"k\.cell_elements is .32. locally and .64. remotely"),
    "fewer layers": ("llama_layers", "float32", "layers 3 are missing remotely"),
    "another window": ("llama_window", "float32", "window_tokens is .0. locally and .64. remotely"),
    "another type": ("llama", "float16", "dtype is .f32. locally and .f16. remotely"),
}
#: The same where caches are in FP8.
OTHERS_IN_FP8 = {"no scales": ("llama", "bfloat16", r"scales is .[0-9a-f]{32}. locally and missing remotely")}


class Mismatch(Asking):
    """Starts one prefill server after the other, at the same ports."""

    def run(self) -> None:
        """Tries all of them."""
        self.handed_over("the same model")
        side = self._pair.case.prefill
        for what, (model, dtype, says) in (OTHERS_IN_FP8 if side.arguments == FP8 else OTHERS).items():
            self._prefill.stop()
            other = self._pair.server("kv_producer", side, self._prefill.port, model=model, dtype=dtype)
            other.start()
            try:
                other.ready()
                other.ask(self.prompt(), 1)  # vLLM's first step may take longer than a load may
                prompt = self.prompt()
                want = self.alone(prompt)
                with self._pair.begun(prompt, other) as params:
                    self.same(what, prompt, params, loads=False, says=says, want=want)
                self.settled(what, other, self._decode)
            finally:
                other.stop()
        self.start_again(self._prefill)
        self.handed_over("the same model again")
