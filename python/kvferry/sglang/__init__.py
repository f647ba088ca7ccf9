"""A transfer backend for SGLang: `--disaggregation-transfer-backend kvferry`.

SGLang loads the package by its entry point in `sglang.srt.plugins`; nothing of SGLang need be changed. Its
schedulers ask a manager, a sender and a receiver (manager.py, request.py) to move what they have computed, and
decode servers learn where prefill ranks are met from the prefill server's bootstrap server (bootstrap.py). What
SGLang caches is described to kvferry by geometry.py. See docs/sglang.md.
"""

from __future__ import annotations

from typing import Any

NAME = "kvferry"


def register() -> None:
    """Adds the backend to those of SGLang. SGLang calls it once in each of its processes.

    Raises ImportError or AttributeError where this SGLang has other names. SGLang logs that, and then refuses
    the backend's name.
    """
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([NAME])
    _add_member(TransferBackend, NAME)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _class_of, HookType.AROUND)


def _add_member(kinds: Any, name: str) -> None:
    """Adds a member to SGLang's closed enumeration of backends, by whose values it finds them."""
    member = object.__new__(kinds)
    member._name_, member._value_ = name.upper(), name
    kinds._member_names_.append(member._name_)
    kinds._member_map_[member._name_] = kinds._value2member_map_[name] = member


def _class_of(others: Any, transfer_backend: Any, class_type: Any) -> Any:
    """The class of a kind, of our backend or of SGLang's."""
    if transfer_backend.value != NAME or class_type.value == "kvargs":
        return others(transfer_backend, class_type)
    from kvferry.sglang import bootstrap, manager, request

    return {
        "manager": manager.KvferryManager,
        "sender": request.KvferrySender,
        "receiver": request.KvferryReceiver,
        "bootstrap_server": bootstrap.KvferryBootstrapServer,
    }[class_type.value]
