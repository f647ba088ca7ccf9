"""Settings of the backend, from the environment: SGLang has no place for those of backends it does not know."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvferry.contact import KeyPair, read_keys
from kvferry.errors import InvalidError

SWITCHES = {"": False, "0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True)
class Settings:
    """How ranks reach each other.

    Attributes:
        transport: KVFERRY_TRANSPORT: kind, see kvferry.transport_kinds()
        keys: in the file KVFERRY_KEY_FILE; None: no encryption
        allowed_keys: KVFERRY_ALLOWED_KEYS, separated by commas: public keys of peers that may connect; none:
            every peer that knows ours
        insecure: KVFERRY_INSECURE: listen beyond loopback without keys
        verify: KVFERRY_VERIFY: check what was moved against checksums of the producer
        weights: KVFERRY_WEIGHTS: a name for the weights, equal on both sides; "": they are not compared
    """

    transport: str
    keys: KeyPair | None
    allowed_keys: tuple[str, ...]
    insecure: bool
    verify: bool
    weights: str


def read_settings() -> Settings:
    """The settings in the environment. Raises InvalidError, which names the variable."""
    file = os.environ.get("KVFERRY_KEY_FILE", "")
    keys = read_keys(file, "KVFERRY_KEY_FILE") if file else None
    allowed = tuple(filter(None, os.environ.get("KVFERRY_ALLOWED_KEYS", "").split(",")))
    if allowed and keys is None:
        raise InvalidError(
            "KVFERRY_ALLOWED_KEYS is given without KVFERRY_KEY_FILE: peers are recognised by keys"
        )
    return Settings(
        transport=os.environ.get("KVFERRY_TRANSPORT") or "auto",
        keys=keys,
        allowed_keys=allowed,
        insecure=_switch("KVFERRY_INSECURE"),
        verify=_switch("KVFERRY_VERIFY"),
        weights=os.environ.get("KVFERRY_WEIGHTS", ""),
    )


def _switch(name: str) -> bool:
    said = os.environ.get(name, "").lower()
    if said not in SWITCHES:
        raise InvalidError(f"{name} is {said!r}; allowed: 0, 1, false, true")
    return SWITCHES[said]
