"""How agents are found and recognised: contacts and keys. See kvferry/agent.h."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvferry._binding import ffi, lib
from kvferry._native import Arena, call, ends, string
from kvferry._values import of_type
from kvferry.errors import InvalidError


class KeyPair(NamedTuple):
    """Z85 keys of CurveZMQ."""

    public_key: str
    secret_key: str


def make_keys() -> KeyPair:
    """Makes a pair of keys, by which agents encrypt messages and recognise each other."""
    public_key, secret_key = ffi.new("char[41]"), ffi.new("char[41]")
    call(lib.kvf_agent_make_keys, public_key, secret_key)
    return KeyPair(string(public_key), string(secret_key))


def read_keys(path: str, name: str) -> KeyPair:
    """The keys in a file, as make_keys() gives them: an object of JSON with public_key and secret_key.

    Args:
        name: of the setting that names the file, for messages

    Raises InvalidError.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return KeyPair(found["public_key"], found["secret_key"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        # The text of a decoding error holds no part of the file; its content is secret.
        raise InvalidError(
            f"{name} {path} cannot be used ({type(error).__name__}: {error}); allowed: a file with an object "
            "of public_key and secret_key, both Z85"
        ) from None


def endpoint_at(host: str, port: int = 0) -> str:
    """The endpoint of a host and a port, to listen on; 0: any free port."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"


@dataclass(frozen=True)
class KeyGrant:
    """A key that may connect, and the ranks for which its holders may speak.

    Only the keys granted for an engine's name may use that name; a key may have several grants.

    Attributes:
        public_key: Z85
        engine: None: any engine that no grant names
        ranks: of that engine, half open; None: all of them
        commands: its holders may give commands (see ask()), and speak for no engine by this grant: `engine` and
            `ranks` are None
    """

    public_key: str
    engine: str | None = None
    ranks: tuple[int, int] | None = None
    commands: bool = False


def grant_fields(grant: KeyGrant, arena: Arena) -> dict[str, Any]:
    """The fields of a kvf_key_grant."""
    ranks = of_type(KeyGrant, grant).ranks
    begin, end = ends((0, 0) if ranks is None else ranks)
    return {
        "struct_size": ffi.sizeof("kvf_key_grant"),
        "public_key": arena.text(grant.public_key),
        "engine": arena.text(grant.engine),
        "rank_begin": begin,
        "rank_end": end,
        "commands": grant.commands,
    }


@dataclass(frozen=True)
class Contact:
    """Where an engine is met: any agent or directory that has the introductions of all its ranks.

    Attributes:
        engine: its name; another engine answering there is an error
        endpoint: Agent.endpoint of that agent
        public_key: of the agent or directory there; None: no encryption
    """

    engine: str
    endpoint: str
    public_key: str | None = None


def contact_fields(contact: Contact, arena: Arena) -> dict[str, Any]:
    """The fields of a kvf_contact."""
    return {name: arena.text(value) for name, value in vars(of_type(Contact, contact)).items()}


def key_fields(keys: KeyPair | None, arena: Arena) -> dict[str, Any]:
    """The fields of a struct that hold a pair of keys."""
    if keys is None:
        return {}
    public_key, secret_key = of_type(KeyPair, keys)
    return {"public_key": arena.text(public_key), "secret_key": arena.text(secret_key)}
