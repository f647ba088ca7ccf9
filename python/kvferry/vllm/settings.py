"""Settings of the connector: `kv_connector_extra_config`, or the environment."""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.contact import KeyGrant, KeyPair, endpoint_at, read_keys
from kvferry.errors import InvalidError
from kvferry.events import Way
from kvferry.transfer_params import is_push

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A host may be busy for seconds; a request with a wrong address waits as long as this.
PATIENCE = 30.0
# Most transfers end within this time.
DRAIN = 5.0
# Users may take minutes to ask the next question.
TURN = 480.0
LONGEST_NAME = 200
LAST_PORT = 65535
EVERYWHERE = ("", "*", "0.0.0.0", "::")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """How engines reach each other, and their time limits.

    Attributes:
        host: side_channel_host or KVFERRY_SIDE_CHANNEL_HOST; other machines need an address they can reach
        port: side_channel_port or KVFERRY_SIDE_CHANNEL_PORT; 0: any free one
        transport: kind, see kvferry.transport_kinds()
        move: how bytes go
        lease: seconds for which a producer keeps blocks without a sign of life of a consumer
        deadline: seconds after which a load fails
        patience: seconds after which a load fails if no engine that has the request was met
        drain: seconds for which a worker waits for its transfers to end before the memory of the caches goes,
            or the engine ends
        convert: element types may be converted into each other, see kvferry.Agent
        verify: check what was moved against checksums of the producer
        insecure: listen beyond loopback without encryption
        weights: name of the weights; "checkpoint": made from the checkpoint; "": weights are not compared
        push: as a producer, write to consumers rather than wait until they read
        turns: as a consumer, keep answers for the producer that gets the next turn; as that producer, read them
        turn: seconds for which an answer is kept
        keys: own keys; None: no encryption
        allowed_keys: public keys of peers that may connect; none: every peer that knows ours
        local_commands: programs of this machine may give commands, as there are no keys
        command_keys: public keys whose holders may give commands
    """

    host: str
    port: int
    transport: str
    move: Way
    lease: float | None
    deadline: float | None
    patience: float
    drain: float
    convert: bool
    verify: bool
    insecure: bool
    weights: str
    push: bool
    turns: bool
    turn: float
    keys: KeyPair | None
    allowed_keys: tuple[str, ...]
    local_commands: bool
    command_keys: tuple[str, ...]

    @property
    def takes_commands(self) -> bool:
        """Whether anybody may give commands."""
        return self.local_commands or bool(self.command_keys)

    @property
    def grants(self) -> list[str | KeyGrant]:
        """All keys that may connect, with their rights; none: every peer that knows our key."""
        return [*self.allowed_keys, *(KeyGrant(key, commands=True) for key in self.command_keys)]

    @property
    def listen(self) -> str:
        """The endpoint on which the ranks listen."""
        return endpoint_at(self.host)

    @property
    def meeting(self) -> str:
        """The endpoint where the engine is met."""
        return endpoint_at(self.host, self.port)


class _Extra:
    """The settings given in `kv_connector_extra_config`. It learns which ones there are by being asked."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._names: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        self._names.append(name)
        return self._given.get(name, default)

    def switch(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise InvalidError(f"{name} is {value!r}; allowed: true, false")
        return value

    def seconds(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise InvalidError(f"{name} is {value!r}; allowed: seconds, above 0")
        return float(value)

    def name(self, name: str) -> str:
        value = self.get(name, "")
        if not isinstance(value, str) or len(value) > LONGEST_NAME or not value.isprintable():
            raise InvalidError(f"{name} is {value!r}; allowed: up to {LONGEST_NAME} printable characters")
        return value

    def public_keys(self, name: str) -> tuple[str, ...]:
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(key, str) for key in value):
            raise InvalidError(f"{name} is {value!r}; allowed: a list of public keys")
        return tuple(value)

    def refuse_others(self) -> None:
        """Raises InvalidError if something was given that nobody asked for."""
        for name in sorted(self._given.keys() - set(self._names)):
            near = difflib.get_close_matches(name, self._names, 1)
            meant = f" (do you mean {near[0]}?)" if near else ""
            raise InvalidError(
                f"{name} is no setting of the kvferry connector{meant}; allowed in kv_connector_extra_config: "
                + ", ".join(self._names)
            )


def read_settings(config: VllmConfig) -> Settings:
    """Settings of one engine. Raises InvalidError, which names the setting."""
    transfer = config.kv_transfer_config
    extra = _Extra(dict(transfer.kv_connector_extra_config) if transfer is not None else {})
    host = str(extra.get("side_channel_host", os.environ.get("KVFERRY_SIDE_CHANNEL_HOST", "127.0.0.1")))
    host = host.removeprefix("[").removesuffix("]")  # as addresses of IPv6 are written before a port
    if host in EVERYWHERE:
        raise InvalidError(
            f"side_channel_host is {host!r}, which stands for all addresses; allowed: the one by which other "
            "servers reach this one"
        )
    said = extra.get("side_channel_port", os.environ.get("KVFERRY_SIDE_CHANNEL_PORT", 0))
    port = _port(said, config.parallel_config.data_parallel_index)
    insecure = extra.switch("insecure")
    file = extra.get("key_file", os.environ.get("KVFERRY_KEY_FILE"))
    keys = read_keys(file, "key_file") if file else None
    allowed = extra.public_keys("allowed_keys")
    if allowed and keys is None:
        raise InvalidError("allowed_keys is given without key_file: only encrypted peers have keys")
    local = extra.switch("local_commands")
    if local and (insecure or keys is not None):
        raise InvalidError(
            f"local_commands is set together with {'insecure' if insecure else 'key_file'}; allowed: without "
            "keys, on loopback; with keys, command_keys says who may give commands"
        )
    operators = extra.public_keys("command_keys")
    if operators and keys is None:
        raise InvalidError("command_keys is given without key_file: without keys, see local_commands")
    if operators and not allowed:
        raise InvalidError(
            "command_keys is given without allowed_keys: with a list of keys only those on it may connect, and "
            "the holders of command_keys may only give commands"
        )
    if host not in LOOPBACK and keys is None and not insecure:
        raise InvalidError(
            f"side_channel_host is {host}, which other machines may reach; give a key_file in "
            'kv_connector_extra_config, or set "insecure": true there where the network is trusted'
        )
    turns = extra.switch("bidirectional_kv_xfer")
    if turns and transfer is not None and not transfer.is_kv_consumer:
        raise InvalidError(
            f"bidirectional_kv_xfer is set in the role {transfer.kv_role}; allowed: kv_both, for in a role "
            "without loads vLLM may still write into blocks that are loaded"
        )
    settings = Settings(
        host=host,
        port=port,
        transport=str(extra.get("transport", "auto")),
        move=_way(extra.get("move", "auto")),
        lease=extra.seconds("kv_lease_duration"),
        deadline=extra.seconds("kv_load_deadline"),
        patience=extra.seconds("kv_load_patience") or PATIENCE,
        drain=extra.seconds("kv_drain_duration") or DRAIN,
        convert=extra.switch("convert"),
        verify=extra.switch("verify"),
        insecure=insecure,
        weights=extra.name("weights"),
        push=is_push(extra.get("transfer_mode", "pull")),
        turns=turns,
        turn=extra.seconds("decoder_kv_blocks_ttl") or TURN,
        keys=keys,
        allowed_keys=allowed,
        local_commands=local,
        command_keys=operators,
    )
    extra.refuse_others()
    return settings


def _port(said: Any, index: int) -> int:
    """The port of one of several data-parallel engines, which all have the same settings; 0: any free one."""
    why = f", as the data-parallel index, {index}, is added" if index else ""
    allowed = f"allowed: 0 (any) to {LAST_PORT - index}{why}"
    try:
        port = int(said)
    except (TypeError, ValueError):
        raise InvalidError(f"side_channel_port is {said!r}; {allowed}") from None
    if not 0 <= port <= LAST_PORT - index:
        raise InvalidError(f"side_channel_port is {port}; {allowed}")
    return port and port + index


def _way(said: Any) -> Way:
    ways = {way.name.lower(): way for way in Way}
    if not isinstance(said, str) or said not in ways:
        raise InvalidError(f"move is {said!r}; allowed: {', '.join(ways)}")
    return ways[said]
