"""kv_transfer_params: what a proxy passes on from the server that has a cache to the one that wants it.

The names are those of vLLM's own connectors, and some of kvferry's. The adapters of all engines read and write
them here, so that the two servers need not be of the same engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.errors import InvalidError, MismatchError
from kvferry.scheduler import TransferParams

#: Forms of kv_transfer_params and of group names: the oldest and the newest that these adapters understand.
#: Engines work together if these ranges overlap.
VERSIONS = (1, 1)

MAX_TOKENS = 2**31 - 1  # more than any sequence has
MAX_GENERATION = 2**31 - 1


def read_source(params: Mapping[str, Any], weights: str) -> TransferParams:
    """Where a cache is, from the parameters that a proxy passes on.

    Args:
        weights: the identity of this engine's; "": it has none

    Raises InvalidError (a parameter is missing, or not what it must be), MismatchError (other weights, or a
    version that these adapters do not understand).
    """
    missing = [
        name
        for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        if params.get(name) is None
    ]
    if missing:
        raise InvalidError(f"kv_transfer_params has no {', '.join(missing)}")
    _check_versions(params.get("kvferry_versions"))
    _check_weights(params.get("kvferry_weights"), weights)
    port = read_number(params, "remote_port", 1, 65535)
    read_number(params, "remote_registration_generation", 0, MAX_GENERATION)  # agents see by themselves
    return TransferParams(
        engine=str(params["remote_engine_id"]),
        id=_transfer_id(params),
        endpoint=f"tcp://{params['remote_host']}:{port}",
        public_key=str(params.get("kvferry_public_key") or ""),
        tokens=read_number(params, "remote_num_tokens", 0, MAX_TOKENS),
        push=is_push(params.get("transfer_mode") or "pull"),
    )


def write_source(
    source: TransferParams, request_id: str, weights: str, groups: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The parameters by which read_source() finds a cache.

    Args:
        request_id: the engine's name of the request, for those who look at it
        groups: the layers of each group of the model, for engines that must be told; see own_group_name()
    """
    host, _, port = source.endpoint.removeprefix("tcp://").rpartition(":")
    return {
        "remote_engine_id": source.engine,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": int(port),
        "remote_num_tokens": source.tokens,
        "transfer_mode": "push" if source.push else "pull",
        "kvferry_transfer_id": source.id.hex(),
        "kvferry_public_key": source.public_key or None,
        "kvferry_weights": weights or None,
        "kvferry_versions": list(VERSIONS),
        "kvferry_groups": [list(layers) for layers in groups] if len(groups) > 1 else None,
    }


def own_group_name(number: int, kind: int | str) -> str:
    """The name of a group of the model itself: the layers of one kind in vLLM's group of this number.

    Groups of two engines are matched by name. A model whose layers are all alike has one group, of kind 0 in
    group 0.
    """
    return f"{number:03}.{kind}"


def read_number(params: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """A parameter that is a number; 0 if it is missing. Raises InvalidError."""
    value = params.get(name) or 0
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):  # the last: of infinity
        raise InvalidError(f"{name} is {value!r}; allowed: {low} to {high}") from None
    if not low <= number <= high:
        raise InvalidError(f"{name} is {number}; allowed: {low} to {high}")
    return number


def read_id(params: Mapping[str, Any]) -> bytes:
    """The name that was given to a transfer. Raises InvalidError."""
    name = params["kvferry_transfer_id"]
    try:
        return bytes.fromhex(name)
    except (TypeError, ValueError):
        raise InvalidError(f"kvferry_transfer_id is {name!r}; allowed: hexadecimal digits") from None


def is_push(mode: Any) -> bool:
    """Whether a transfer_mode says that producers write. Raises InvalidError."""
    if mode not in ("pull", "push"):
        raise InvalidError(f"transfer_mode is {mode!r}; allowed: pull, push")
    return bool(mode == "push")


def _transfer_id(params: Mapping[str, Any]) -> bytes:
    """Both engines' name of the transfer; producers other than ours do not give it a name."""
    if not params.get("kvferry_transfer_id"):
        return str(params["remote_request_id"]).encode()
    return read_id(params)


def _check_weights(theirs: object, ours: str) -> None:
    if (theirs or "") != ours:
        raise MismatchError(
            f"kvferry_weights is {theirs or None!r}; this engine's weights are {ours or None!r}"
        )


def _check_versions(theirs: object) -> None:
    """Both sides must understand a common form of the parameters; no range means the first."""
    oldest, newest = VERSIONS
    said = (1, 1) if theirs is None else theirs
    if not (
        isinstance(said, Sequence)
        and len(said) == 2
        and all(isinstance(number, int) for number in said)
        and 1 <= said[0] <= said[1]
    ):
        raise InvalidError(f"kvferry_versions is {theirs!r}; allowed: the oldest and newest, both at least 1")
    if said[1] < oldest or said[0] > newest:
        raise MismatchError(
            f"kvferry_versions is {said[0]} to {said[1]}; this connector understands {oldest} to {newest}: "
            "update the older of the two engines"
        )
