"""A client's request, and what each server is asked for it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.vllm.proxy_answers import Refused, error_answer
from kvferry.vllm.proxy_servers import Prompt, read_prompt

TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
#: Fields that a prefill server does not get: it makes one token, which no client sees.
NOT_TO_PREFILL = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
)


@dataclass(frozen=True)
class Work:
    """A request of a client.

    Attributes:
        name: with which servers are asked
        headers: those that servers get, too
        alone: why a decode server must compute all of it; "": it need not
        before: parameters of the turn before, if a decode server has kept its answer to that
    """

    path: str
    body: dict[str, Any]
    prompt: Prompt
    name: str
    headers: dict[str, str]
    alone: str
    before: dict[str, Any] | None = None

    @property
    def is_stream(self) -> bool:
        """Whether its answer comes piece by piece."""
        return bool(self.body.get("stream"))

    def for_prefill(self, transfer: str = "") -> dict[str, Any]:
        """The request to a prefill server; `transfer` names the transfer if both servers are asked at once."""
        body = {key: value for key, value in self.body.items() if key not in NOT_TO_PREFILL}
        params = TO_PREFILL | ({"kvferry_transfer_id": transfer} if transfer else {})
        body |= {"stream": False, "max_tokens": 1, "kv_transfer_params": self.before or params}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        return body

    def for_decode(self, params: dict[str, Any] | None) -> dict[str, Any]:
        """The request to a decode server; without parameters it computes the prompt."""
        return self.body | ({"kv_transfer_params": params} if params else {})


def read_work(path: str, content: bytes, headers: Mapping[str, str]) -> Work:
    """What a client asks for; raises Refused."""
    try:
        body = json.loads(content)
    except ValueError as error:
        raise Refused(error_answer(400, f"the body is not JSON: {error}")) from None
    if not isinstance(body, dict):
        raise Refused(error_answer(400, "the body is not an object"))
    body.pop("kv_transfer_params", None)  # a client may not choose which servers speak with each other
    name = headers.get("X-Request-Id") or uuid.uuid4().hex
    return Work(path, body, read_prompt(body), name, passed_on(headers), why_not_handed_over(body))


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """A client's headers that servers get, too."""
    return {name: headers[name] for name in ("Authorization",) if name in headers}


def why_not_handed_over(body: dict[str, Any]) -> str:
    """Why a decode server must compute the whole request; "": it need not.

    The parameters of a prefill server are for one prompt, and can be used once.
    """
    if _count_prompts(body.get("prompt")) + _count_prompts(body.get("prompt_embeds")) > 1:
        return "several_prompts"
    if body.get("use_beam_search") or any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return "several_answers"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        return "prompt_logprobs"  # only the server that computes the prompt has them
    return ""


def _count_prompts(said: Any) -> int:
    """How many prompts there are in a field: texts, lists of token ids, or embeddings."""
    if isinstance(said, list) and not all(type(item) is int for item in said):
        return len(said)
    return said is not None
