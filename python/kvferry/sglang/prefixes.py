"""What a decode server's cache of prefixes has of a prompt: never all of it, so that something moves.

SGLang's row of small data comes with what moves. Nothing would, of a prompt that the decode server has
to its end.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation import decode

_match = decode.match_kv_cache
_build = decode.DecodePreallocQueue._build_decode_prefix_match


def lack_last_tokens() -> None:
    """From here on SGLang looks for all but the last token of a prompt, as its prefill servers do, too."""
    decode.match_kv_cache = _match_less
    decode.DecodePreallocQueue._build_decode_prefix_match = _build_less


def _less(tokens: Any, limit: int | None) -> int:
    most = max(0, len(tokens) - 1)
    return most if limit is None else min(limit, most)


def _match_less(req: Any, cache: Any, tokens: Any, *, max_prefix_len: int | None = None, **more: Any) -> Any:
    """In the device's memory and the host's."""
    return _match(req, cache, tokens, max_prefix_len=_less(tokens, max_prefix_len), **more)


def _build_less(queue: Any, req: Any, result: Any, *, max_prefix_len: int | None = None) -> Any:
    """In storage, too."""
    return _build(queue, req, result, max_prefix_len=_less(req.origin_input_ids, max_prefix_len))
