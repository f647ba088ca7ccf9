"""The two ends of a request, as SGLang's schedulers see them."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender

from kvferry.contact import Contact
from kvferry.errors import KvferryError
from kvferry.sglang.bootstrap import ask_contact


class KvferrySender(CommonKVSender):
    """A request in a prefill rank, from its arrival until SGLang has freed its pages."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *more: Any, **others: Any) -> None:
        mgr.begin(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *more, **others)

    def abort(self) -> None:
        """The request is not wanted any more."""
        super().abort()
        self.kv_mgr.give_up(self.bootstrap_room)

    def clear(self) -> None:
        """SGLang forgets the request."""
        self.kv_mgr.forget(self.bootstrap_room)
        super().clear()


class KvferryReceiver(CommonKVReceiver):
    """A request in a decode rank, from its arrival until its cache is there, or nobody writes it any more."""

    def _register_kv_args(self) -> bool:
        """Meets the prefill engine. Agents introduce themselves, so there is nothing to register."""
        try:
            contact = ask_contact(self.bootstrap_addr, self.prefill_dp_rank)
            self.kv_mgr.agent.connect(contact)
        except KvferryError as error:
            self._fail(str(error))
            return False
        for info in self.bootstrap_infos:
            info["kvferry"] = contact
        return True

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        **more: Any,
    ) -> None:
        """Lets the prefill ranks write into pages, and tells them so."""
        if self.bootstrap_infos and destination == KVTransferDestination.DEVICE:
            contact: Contact = self.bootstrap_infos[0]["kvferry"]
            try:
                self.kv_mgr.expect(
                    self.bootstrap_room,
                    contact,
                    kv_indices,
                    state_indices or [],
                    decode_prefix_len or 0,
                    aux_index,
                )
            except KvferryError as error:
                self._fail(str(error))
                return
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, destination, **more)

    def poll(self) -> KVPoll:
        """What has become of the request. After a failure the next one meets the prefill engine anew."""
        status = super().poll()
        if status == KVPoll.Failed:
            self.invalidate_cached_bootstrap_infos()
        return status

    def abort(self) -> None:
        """The request is not wanted any more. One that has failed keeps its reason."""
        self.poll()
        super().abort()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """The request has failed, or is not wanted any more."""
        super().ensure_abort_notified(force_arm=force_arm)
        self.kv_mgr.stop(self.bootstrap_room)

    def clear(self) -> None:
        """SGLang forgets the request."""
        super().clear()
        self.kv_mgr.stop(self.bootstrap_room)

    def _fail(self, why: str) -> None:
        self.kv_mgr.fail(self.bootstrap_room, why)
        self.conclude_state = KVPoll.Failed
