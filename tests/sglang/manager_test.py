"""What managers, senders and receivers tell SGLang's schedulers, without servers.

A prefill and a decode engine with one manager for each rank live in this process. SGLang's part of a manager is
left out: what it reads of its servers is set by hand, and messages go from one object to the other.
"""

from __future__ import annotations

import threading
import time
import unittest
from collections import defaultdict
from typing import Any
from unittest import mock

import numpy as np
from pools_test import PAGE, TOKENS, Heads, Latents, Rank, differing, fill, whole_model
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVManager, KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel

from kvferry import AgainError
from kvferry.sglang.manager import FAILURES, KvferryManager
from kvferry.sglang.request import KvferryReceiver, KvferrySender

SECONDS = 30
COLUMNS = (64, 40)  # bytes of a row
ROWS = 4
ROOM = 77


class Manager(KvferryManager):
    """A rank's manager without servers."""

    def __init__(self, rank: Rank, mode: DisaggregationMode, columns: tuple[int, ...] = COLUMNS) -> None:
        self.rank = rank
        self.agent, self._components, self._buffers = rank.agent, rank.components, rank.arrays
        self.disaggregation_mode = mode
        self._pushes, self._loads, self._failed, self._lock = {}, {}, {}, threading.RLock()
        self.columns = [np.zeros((ROWS, length), np.uint8) for length in columns]
        self.kv_args = rank.args
        self.kv_args.aux_data_ptrs = [column.ctypes.data for column in self.columns]
        self.kv_args.aux_item_lens = list(columns)
        self.request_status: dict[int, Any] = {}
        self.transfer_infos: dict[int, Any] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.failure_records: dict[int, str] = {}
        self.failure_lock = threading.Lock()
        self.connection_lock = threading.Lock()
        self.connection_pool: dict[str, Any] = {}
        self.addr_to_rooms_tracker: dict[str, set[int]] = defaultdict(set)
        self.prefill_response_tracker: dict[int, Any] = {}
        self.required_prefill_response_num_table: dict[int, int] = {}
        self._staging_outstanding: dict[int, int] = {}
        self._deferred_ack_targets: dict[int, Any] = {}
        self._deferred_ack_poisoned_rooms: set[int] = set()
        self.deferred_bootstrap = self._staging_ctx = None
        self.defer_decode_allocation = self.enable_staging = self.is_dummy_cp_rank = False
        self.enable_all_cp_ranks_for_transfer = False
        self.bootstrap_timeout = self.waiting_timeout = SECONDS
        self.local_ip, self.rank_port = "127.0.0.1", id(self)
        self.others: dict[int, Manager] = {}  # by port
        self.attn_tp_rank, self.pp_rank, self.pp_size = rank.tp[0], 0, 1
        self.attn_cp_size, self.attn_cp_rank = 1, 0
        self.enable_deferred_decode_kv_release = True
        self.kv_item_lens_sum = self.state_item_lens_sum = 1
        self._kv_replica_factor = 1
        self.sender_trace_module = None

    def _send_multipart_locked(self, endpoint: str, parts: Any, is_ipv6: bool = False) -> None:
        self.others[int(endpoint.rpartition(":")[2])]._hear(parts)


class Receiver(KvferryReceiver):
    """A request in a decode rank; what it sends goes to managers in this process."""

    def __init__(self, manager: Manager, prefill: list[Manager], room: int) -> None:
        super().__init__(manager, "bootstrap", room)
        self.prefill = prefill
        self.required_dst_info_num = 0  # set by send()
        self.bootstrap_infos = [
            {"kvferry": prefill[0].agent.contact, "is_dummy": False, "to": to} for to in prefill
        ]
        self.kv_mgr.update_status(room, KVPoll.WaitingForInput)

    def _send_bootstrap_message(self, *, bootstrap_info: Any, message: Any, operation: str) -> bool:
        bootstrap_info["to"]._hear(message)
        return True

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        for prefill in self.prefill:
            prefill._hear(AbortNotification(self.bootstrap_room).to_zmq())


class Scene(unittest.TestCase):
    """A prefill and a decode engine."""

    def setUp(self) -> None:
        self.enterContext(get_parallel().override(attn_dcp_size=1, num_dp_ranks=1))
        self.agents: list[Any] = []

    def tearDown(self) -> None:
        for agent in self.agents:
            agent.close()

    def engines(self, kind: type, prefill: int, decode: int, columns: tuple[int, ...] = COLUMNS) -> None:
        """Makes a prefill and a decode engine of so many ranks, and fills the prefill engine's cache."""
        draw = np.random.default_rng(3)
        both = []
        for name, mode, size in (
            ("p", DisaggregationMode.PREFILL, prefill),
            ("d", DisaggregationMode.DECODE, decode),
        ):
            ranks = [Rank(kind, name, rank, size, draw) for rank in range(size)]
            self.agents += [rank.agent for rank in ranks]
            for rank in ranks[1:]:
                ranks[0].agent.introduce(rank.agent.introduction)
                rank.pages = ranks[0].pages
            both.append([Manager(rank, mode, COLUMNS if name == "p" else columns) for rank in ranks])
        self.prefill, self.decode = both
        for manager in self.prefill:
            manager.others = {other.rank_port: other for other in self.decode}
        self.whole = whole_model([manager.rank for manager in self.prefill], np.random.default_rng(5))
        for i, manager in enumerate(self.prefill):
            fill(manager.rank, self.whole)
            for column in manager.columns:
                column[1] = np.arange(column.shape[1]) + i

    def ask(self, room: int = ROOM) -> None:
        """The decode ranks let the request be written, and say so; prefill ranks have got it."""
        self.senders = [KvferrySender(manager, "bootstrap", room) for manager in self.prefill]
        self.receivers = [Receiver(manager, self.prefill, room) for manager in self.decode]
        for receiver in self.receivers:
            receiver.required_dst_info_num = len(self.decode)
            receiver.send_metadata(receiver.kv_mgr.rank.pages, 2, [], 0)
        for sender in self.senders:
            self.assertEqual(sender.poll(), KVPoll.WaitingForInput)
            sender.init(len(sender.kv_mgr.rank.pages), 1)

    def compute_some(self, pages: int) -> None:
        """Prefill ranks send a first chunk of so many pages."""
        for sender in self.senders:
            sender.send(sender.kv_mgr.rank.pages[:pages], num_kv_tokens=pages * PAGE)

    def compute(self, *chunks: int) -> None:
        """Prefill ranks send chunks of so many pages, and the rest."""
        for sender in self.senders:
            left = sender.kv_mgr.rank.pages
            for count in chunks:
                sender.send(left[:count], num_kv_tokens=count * PAGE)
                left = left[count:]
            pages = len(sender.kv_mgr.rank.pages)
            sender.send(left, [], num_kv_tokens=TOKENS % PAGE + (pages - sum(chunks) - 1) * PAGE)

    def end(self, *ends: Any) -> list[Any]:
        """Polls senders or receivers until all have ended; what they then say."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            said = [end.poll() for end in ends]
            if all(status in (KVPoll.Success, KVPoll.Failed) for status in said):
                return said
            time.sleep(0.001)
        self.fail(f"nothing has become of {said}")

    def judge_cells(self) -> None:
        """All decode ranks have what they must have."""
        for manager in self.decode:
            self.assertEqual(differing(manager.rank, self.whole), [])

    def judge_failed(self, end: Any, why: str) -> None:
        """A sender or receiver has failed, and says why."""
        self.assertEqual(self.end(end), [KVPoll.Failed])
        with self.assertRaisesRegex(KVTransferError, why):
            end.failure_exception()

    def judge_forgotten(self) -> None:
        """Nothing of the request is left in any manager."""
        for end in (*self.senders, *self.receivers):
            end.clear()
        for manager in (*self.prefill, *self.decode):
            self.assertEqual((manager._pushes, manager.request_status, manager.transfer_infos), ({}, {}, {}))
        until = time.monotonic() + SECONDS
        while any(not manager.is_abort_release_safe(ROOM, 1) for manager in self.decode) or any(
            any(manager.agent.stats.requests_now.values()) for manager in (*self.prefill, *self.decode)
        ):
            self.assertLess(time.monotonic(), until)
        for manager in self.decode:
            self.assertEqual(manager._loads, {})


class Requests(Scene):
    """Requests that go well."""

    def test_all_cells_and_the_row_arrive_before_success_is_told(self) -> None:
        for sizes in ((1, 1), (2, 1), (1, 2)):
            with self.subTest(sizes=sizes):
                self.engines(Heads, *sizes)
                self.ask()
                self.compute(2, 1)
                self.assertEqual(set(self.end(*self.receivers, *self.senders)), {KVPoll.Success})
                self.judge_cells()
                for manager in self.decode:
                    for length, column in zip(COLUMNS, manager.columns, strict=True):
                        np.testing.assert_array_equal(column[2], np.arange(length) + sizes[0] - 1)
                        self.assertFalse(column[[0, 1, 3]].any())
                self.judge_forgotten()

    def test_a_prefill_rank_of_which_nobody_wants_anything_succeeds_after_its_last_chunk(self) -> None:
        self.engines(Latents, 4, 1)
        self.ask()
        time.sleep(0.2)  # the agents of such ranks have said that they are done
        self.assertEqual({sender.poll() for sender in self.senders}, {KVPoll.WaitingForInput})
        self.compute_some(2)
        self.assertEqual({sender.poll() for sender in self.senders}, {KVPoll.Transferring})
        for sender in self.senders:
            sender.send(sender.kv_mgr.rank.pages[2:], [], num_kv_tokens=TOKENS - 2 * PAGE)
        self.assertEqual(set(self.end(*self.receivers, *self.senders)), {KVPoll.Success})
        self.judge_cells()
        self.judge_forgotten()

    def test_a_prefill_rank_waits_for_all_decode_ranks(self) -> None:
        self.engines(Heads, 1, 2)
        (manager,) = self.prefill
        sender = KvferrySender(manager, "bootstrap", ROOM)
        first, second = (Receiver(decode, self.prefill, ROOM) for decode in self.decode)
        first.required_dst_info_num = second.required_dst_info_num = 2
        first.send_metadata(first.kv_mgr.rank.pages, 2, [], 0)
        self.assertEqual(sender.poll(), KVPoll.Bootstrapping)
        second.send_metadata(second.kv_mgr.rank.pages, 2, [], 0)
        self.assertEqual(sender.poll(), KVPoll.WaitingForInput)
        sender.abort()

    def test_a_room_may_be_used_again(self) -> None:
        self.engines(Heads, 2, 1)
        for _ in range(3):
            self.ask()
            self.compute()
            self.assertEqual(set(self.end(*self.receivers, *self.senders)), {KVPoll.Success})
            self.judge_forgotten()

    def test_memory_may_go_and_come_back_between_requests(self) -> None:
        self.engines(Heads, 1, 1)
        self.ask()
        for manager in self.decode:
            with self.assertRaises(AgainError):
                manager.deregister_buffer_to_engine()
        self.compute()
        self.assertEqual(set(self.end(*self.receivers, *self.senders)), {KVPoll.Success})
        self.judge_forgotten()
        for manager in (*self.prefill, *self.decode):
            manager.deregister_buffer_to_engine()
        for manager in self.decode:
            for array in manager.rank.arrays:
                array[:] = 0
        for manager in (*self.prefill, *self.decode):
            manager.register_buffer_to_engine()
        self.ask()
        self.compute()
        self.assertEqual(set(self.end(*self.receivers, *self.senders)), {KVPoll.Success})
        self.judge_cells()


class Failures(Scene):
    """Requests that fail: both sides say why, and the blocks come back."""

    def test_an_abort_of_the_prefill_server_is_told(self) -> None:
        self.engines(Heads, 1, 1)
        self.ask()
        self.senders[0].send(self.prefill[0].rank.pages[:2])  # SGLang need not say how many tokens
        self.senders[0].abort()
        self.judge_failed(self.receivers[0], "the prefill server: Aborted by AbortReq")
        self.judge_failed(self.senders[0], "Aborted by AbortReq")
        self.judge_forgotten()

    def test_a_rank_that_has_not_failed_says_that_another_one_has(self) -> None:
        self.engines(Heads, 2, 1)
        self.ask()
        self.compute_some(2)
        self.prefill[0].fail(ROOM, "no memory")
        with self.assertRaises(KVTransferError) as raised:
            self.senders[1].failure_exception()
        self.assertTrue(raised.exception.is_from_another_rank)
        self.judge_failed(self.senders[0], "no memory")
        self.judge_failed(self.receivers[0], "the prefill server: no memory")
        self.judge_forgotten()

    def test_a_peer_that_goes_is_named(self) -> None:
        for which, says in (("prefill", "^.*: p( rank 0)?: "), ("decode", "d rank 0 gave the request up")):
            with self.subTest(which):
                self.engines(Heads, 1, 1)
                self.ask()
                self.compute_some(2)
                time.sleep(0.3)  # it is being written
                getattr(self, which)[0].agent.close()
                (end,) = self.receivers if which == "prefill" else self.senders
                self.judge_failed(end, says)

    def test_a_room_may_be_used_again_at_once(self) -> None:
        self.engines(Heads, 1, 1)
        self.ask()
        self.senders[0].abort()
        for end in (*self.senders, *self.receivers):
            end.clear()  # before anybody has polled: events of the first request are yet to be taken
        while not self.decode[0].is_abort_release_safe(ROOM, 0):
            pass
        self.ask()
        self.compute()
        self.assertEqual(set(self.end(*self.receivers, *self.senders)), {KVPoll.Success})
        self.judge_cells()
        self.judge_forgotten()

    def test_a_decode_rank_that_asks_too_late_is_told_at_once(self) -> None:
        self.engines(Heads, 2, 1)
        for manager in self.prefill:
            sender = KvferrySender(manager, "bootstrap", ROOM)
            manager.record_failure(ROOM, "timed out")
            manager.update_status(ROOM, KVPoll.Failed)
            self.judge_failed(sender, "timed out")
        self.senders = []
        self.receivers = [Receiver(manager, self.prefill, ROOM) for manager in self.decode]
        for receiver in self.receivers:
            receiver.required_dst_info_num = 1
            receiver.send_metadata(receiver.kv_mgr.rank.pages, 2, [], 0)
            self.assertEqual(receiver.poll(), KVPoll.Failed)
            self.judge_failed(receiver, "the prefill server: timed out")
        self.judge_forgotten()
        self.ask()  # another request with this room
        self.compute()
        self.assertEqual(set(self.end(*self.receivers, *self.senders)), {KVPoll.Success})

    def test_a_prefill_rank_keeps_the_reasons_of_the_latest_failures_only(self) -> None:
        self.engines(Heads, 1, 1)
        (manager,) = self.prefill
        for room in range(FAILURES + 5):
            KvferrySender(manager, "bootstrap", room).abort()
        self.assertEqual(list(manager._failed), list(range(5, FAILURES + 5)))

    def test_an_abort_of_the_decode_server_is_told(self) -> None:
        self.engines(Heads, 2, 1)
        self.ask()
        self.compute_some(2)
        self.receivers[0].abort()
        for sender in self.senders:
            self.judge_failed(sender, "aborted by the decode server")
        self.judge_failed(self.receivers[0], "Aborted by AbortReq")
        self.judge_forgotten()

    def test_blocks_are_not_free_while_somebody_may_write_them(self) -> None:
        self.engines(Heads, 1, 1)
        self.ask()
        (manager,) = self.decode
        self.assertFalse(manager.is_abort_release_safe(ROOM, 0))
        # Another request gets the same pages too early: it is refused, and the first one goes on.
        other = Receiver(manager, self.prefill, ROOM + 1)
        other.required_dst_info_num = 1
        other.send_metadata(manager.rank.pages, 3, [], 0)
        self.judge_failed(other, "is being filled by the request of ticket 1")
        self.compute()
        self.assertEqual(self.end(*self.receivers), [KVPoll.Success])
        self.assertTrue(manager.is_abort_release_safe(ROOM, 0))
        self.judge_cells()

    def test_what_ends_late_changes_nothing_of_another_request(self) -> None:
        self.engines(Heads, 1, 1)
        self.ask()
        self.compute()
        self.assertEqual(self.end(*self.senders), [KVPoll.Success])
        (manager,) = self.decode
        self.receivers[0].clear()  # SGLang gives the row to another request, of the same room
        manager.update_status(ROOM, KVPoll.Bootstrapping)
        manager.columns[0][2] = 9
        until = time.monotonic() + SECONDS
        while not manager.is_abort_release_safe(ROOM, 0):
            self.assertLess(time.monotonic(), until)
        self.assertEqual(manager.check_status(ROOM), KVPoll.Bootstrapping)
        self.assertTrue((manager.columns[0][2] == 9).all())

    def test_rows_of_another_size_are_refused_by_name(self) -> None:
        self.engines(Heads, 1, 1, columns=(64, 48))
        self.ask()
        self.compute()
        self.judge_failed(
            self.receivers[0], "row of metadata has 104 bytes, the decode server's 112; allowed: the same"
        )

    def test_prompts_of_other_lengths_fail_on_both_sides(self) -> None:
        for chunks in ((), (2, 4)):
            for which, other in (("prefill", "decode"), ("decode", "prefill")):
                with self.subTest(chunks=chunks, which=which):
                    self.engines(Heads, 1, 1)
                    shorter = getattr(self, which)[0].rank
                    shorter.pages = shorter.pages[:-1]
                    self.ask()
                    self.compute(*chunks)
                    here = {which: TOKENS - PAGE, other: TOKENS}
                    end = -(-here["decode"] // PAGE) * PAGE
                    said = f"{here['prefill']} tokens in the prefill server, and {end - PAGE + 1} to {end} in"
                    self.judge_failed(self.senders[0], said)
                    self.judge_failed(self.receivers[0], f"the prefill server: .*{said}")
                    self.judge_forgotten()

    def test_a_prefill_server_that_does_not_fit_fails_its_requests_and_no_others(self) -> None:
        self.engines(Heads, 1, 1)
        (manager,) = self.decode
        misfit, other = (KvferryReceiver(manager, name, room) for name, room in (("here", 1), ("there", 2)))
        why = RuntimeError("KV cache dtype mismatch")  # with which SGLang would end the decode server
        with mock.patch.object(CommonKVManager, "try_ensure_parallel_info", side_effect=why):
            self.assertFalse(manager.try_ensure_parallel_info("here"))
        misfit.abort()  # SGLang does that when it has asked often enough
        self.judge_failed(misfit, "the prefill server here does not fit: KV cache dtype mismatch")
        self.assertEqual(other.poll(), KVPoll.Bootstrapping)

    def test_a_message_that_is_none_changes_nothing(self) -> None:
        self.engines(Heads, 1, 1)
        for frames in ([b"x"], [b"ABORT"], [b"ABORT", b"z"]):
            self.prefill[0]._hear(frames)
        self.assertEqual(self.prefill[0].request_status, {})


if __name__ == "__main__":
    unittest.main()
