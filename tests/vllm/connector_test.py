"""Both halves of the connector without servers: the calls of vLLM's engine, and their results."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import pathlib
import socket
import tempfile
import time
import unittest
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from halves import LAYERS, Half, a_request, blocks_of, output_of, steps
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.request import RequestStatus

import kvferry
from kvferry.errors import InputOutputError, InvalidError
from kvferry.scheduler import InstructionKind
from kvferry.vllm.connector import KvferryConnector
from kvferry.vllm.settings import read_settings
from kvferry.vllm.statistics import KvferryStats

TOKENS = 100
THERE, HERE = [3, 7, 5, 1], [9, 2, 4, 8, 6, 10, 11]  # blocks of 32 and of 16 tokens
LOGGER = "vllm.kvferry"


class Pairs(unittest.TestCase):
    """A prefill and a decode engine with different block sizes."""

    def engine(self, *arguments: Any, **options: Any) -> Half:
        half = Half(*arguments, **options)
        self.addCleanup(half.close)
        return half

    def pair(self, **extra: Any) -> tuple[Half, Half]:
        return self.engine("prefill", 32, **extra), self.engine("decode", 16, **extra)

    @contextlib.contextmanager
    def says(self, *texts: str) -> Iterator[None]:
        """Requires a warning with one of the texts."""
        with self.assertLogs(LOGGER, logging.WARNING) as log:
            yield
        said = any(text in line for text in texts for line in log.output)
        self.assertTrue(said, f"none of {texts} is in {log.output}")

    def hand_over(self, prefill: Half, decode: Half, name: str = "r", salt: int = 0) -> None:
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS), salt)
        params = prefill.serve(name, TOKENS, THERE)
        self.assertEqual(decode.want(name, TOKENS, params, HERE), TOKENS)
        steps(prefill, decode, until=lambda: name in decode.received and name in prefill.sent)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS), salt), 0)


class Beside(unittest.TestCase):
    def test_a_multi_connector_finds_its_statistics_by_name(self) -> None:
        found: Any = MultiConnector.build_kv_connector_stats({"KvferryConnector": {"loads": 1}})
        self.assertIsInstance(found["KvferryConnector"], KvferryStats)


class Moving(Pairs):
    def test_consumers_read(self) -> None:
        self.hand_over(*self.pair())

    def test_producers_write(self) -> None:
        prefill, decode = self.pair(transfer_mode="push")
        self.hand_over(prefill, decode)
        stats = prefill.worker.take_stats()
        assert stats is not None
        self.assertGreater(stats.data["written_bytes"], 0)

    def test_requests_that_share_the_clients_id_are_written_each_to_its_own_consumer(self) -> None:
        prefill, decode = self.pair(transfer_mode="push")
        tables = {"cmpl-trace-0-0a1b2c3d": ([3, 7], [9, 2, 4]), "cmpl-trace-0-4e5f6071": ([5, 1], [8, 6, 10])}
        told = {}
        for salt, (name, (there, _)) in enumerate(tables.items()):
            for layer in range(LAYERS):
                prefill.write(layer, there, range(40), salt)
            told[name] = prefill.serve(name, 40, there)
            self.assertTrue(bytes.fromhex(told[name]["kvferry_transfer_id"]).startswith(name.encode()))
        for name in reversed(tables):  # the later one is wanted first
            decode.want(name, 40, told[name], tables[name][1])
        with self.assertNoLogs(LOGGER, logging.ERROR):
            steps(prefill, decode, until=lambda: decode.received == prefill.sent == set(tables))
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for salt, (_, here) in enumerate(tables.values()):
            for layer in range(LAYERS):
                self.assertEqual(decode.wrong(layer, here, range(40), salt), 0)

    def test_bytes_go_the_way_that_the_settings_name(self) -> None:
        for mode in ("pull", "push"):
            for move in ("direct", "packed", "auto"):
                with self.subTest(mode=mode, move=move):
                    prefill, decode = self.pair(transfer_mode=mode, move=move)
                    self.hand_over(prefill, decode)
                    stats = (decode if mode == "pull" else prefill).worker.take_stats()
                    assert stats is not None
                    moved = stats.data["bytes"] + stats.data["written_bytes"]
                    self.assertGreater(moved, 0)
                    packed = {"direct": (0,), "packed": (moved,), "auto": (0, moved)}[move]
                    self.assertIn(stats.data["packed_bytes"], packed)
                    prefill.close()
                    decode.close()

    def test_the_producer_says_who_moves(self) -> None:
        self.hand_over(self.engine("prefill", 32, transfer_mode="push"), self.engine("decode", 16))

    def test_engines_are_met_at_an_address_of_ipv6(self) -> None:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            self.skipTest(f"no IPv6 here: {error}")
        for host in ("::1", "[::1]"):
            with self.subTest(host):
                prefill, decode = self.pair(side_channel_host=host)
                self.hand_over(prefill, decode)
                assert prefill.scheduling._directory is not None
                self.assertIn("tcp://[::1]:", prefill.scheduling._directory.endpoint)

    def test_both_roles_in_one_engine(self) -> None:
        one, other = self.engine("one", 32), self.engine("other", 32)
        for producer, consumer, name in ((one, other, "a"), (other, one, "b")):
            for layer in range(LAYERS):
                producer.write(layer, THERE, range(TOKENS), salt=ord(name))
            params = producer.serve(name, TOKENS, THERE)
            self.assertEqual(consumer.want(name, TOKENS, params, [11, 12, 13, 14]), TOKENS)
        steps(one, other, until=lambda: "a" in other.received and "b" in one.received)
        for consumer, salt in ((other, ord("a")), (one, ord("b"))):
            for layer in range(LAYERS):
                self.assertEqual(consumer.wrong(layer, [11, 12, 13, 14], range(TOKENS), salt), 0)

    def test_a_prefix_that_is_cached_here_is_left_alone(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                self.load_the_rest(*self.pair(transfer_mode=mode))

    def load_the_rest(self, prefill: Half, decode: Half) -> None:
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
            decode.write(layer, HERE, range(48), salt=7)
        params = prefill.serve("r", TOKENS, THERE)
        self.assertEqual(decode.want("r", TOKENS, params, HERE, computed=48), TOKENS - 48)
        steps(prefill, decode, until=lambda: "r" in decode.received and "r" in prefill.sent)
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(48), salt=7), 0)
            self.assertEqual(decode.wrong(layer, HERE, range(48, TOKENS)), 0)

    def test_a_producer_learns_that_nothing_is_wanted(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                self.want_nothing(*self.pair(transfer_mode=mode))

    def want_nothing(self, prefill: Half, decode: Half) -> None:
        params = prefill.serve("r", TOKENS, THERE)
        self.assertEqual(decode.want("r", TOKENS, params, HERE, computed=TOKENS), 0)
        steps(prefill, decode, until=lambda: "r" in prefill.sent)
        self.assertEqual(decode.received, set())
        stats = decode.worker.take_stats()  # letting go of blocks is not a load
        self.assertEqual(stats.data["loads"] if stats else 0, 0)

    def test_a_producer_learns_at_once_that_its_parameters_are_refused(self) -> None:
        for mode in ("pull", "push"):
            prefill, decode = self.pair(transfer_mode=mode)
            for name, forged, role in (
                ("prompt", {"kvferry_prompt": "another"}, True),
                ("rotation", {"kvferry_rotation": "another"}, True),
                ("role", {}, False),
            ):
                decode.scheduling._rotation = "ours"
                decode.config.kv_transfer_config.is_kv_consumer = role
                with self.subTest(name, mode=mode), self.says(f"request {name} is computed here"):
                    params = prefill.serve(name, TOKENS, THERE)
                    self.assertEqual(decode.want(name, TOKENS, params | forged, HERE), 0)
                    self.let_go(name, prefill, decode)

    def test_a_producer_learns_at_once_that_vllm_has_refused_a_request(self) -> None:
        """vLLM then adds a request of one token, 0, and ends it."""
        for mode in ("pull", "push"):
            prefill, decode = self.pair(transfer_mode=mode)
            for name, tokens in (("long", TOKENS), ("short", 1)):
                with self.subTest(name, mode=mode), self.assertNoLogs(LOGGER, logging.ERROR):
                    request = a_request(name, 1, prefill.serve(name, tokens, THERE))
                    request.prompt_token_ids = request.all_token_ids = [99]
                    request.abort_immediately = True
                    decode.scheduling.add(request)
                    self.assertEqual(decode.scheduling.finished(request, [[]], False), (False, None))
                    self.let_go(name, prefill, decode)

    def let_go(self, name: str, prefill: Half, decode: Half) -> None:
        begun = time.monotonic()
        steps(prefill, decode, until=lambda: name in prefill.sent and not decode.worker._jobs)
        self.assertLess(time.monotonic() - begun, 10)  # its lease, or a push's deadline, is longer
        self.assertEqual((decode.received, decode.scheduling._schedule.counts.requests), (set(), 0))

    def test_nothing_is_sent_where_parameters_cannot_be_read(self) -> None:
        prefill, decode = self.pair()
        params = prefill.serve("r", TOKENS, THERE)
        for i, wrong in enumerate(
            ({"remote_port": "http"}, {"kvferry_versions": [7, 9]}, {"kvferry_weights": "w"})
        ):
            with self.says("is computed here"):
                decode.want(f"r{i}", TOKENS, params | wrong, HERE)
        self.assertEqual(decode.step().instructions, [])

    def test_a_producer_that_is_gone_is_told_for_no_longer_than_a_load_may_take(self) -> None:
        prefill, decode = self.pair(transfer_mode="push", kv_load_deadline=1)
        params = prefill.serve("r", TOKENS, THERE)
        prefill.close()
        self.assertEqual(decode.want("r", TOKENS, params, HERE, computed=TOKENS), 0)
        decode.step()
        self.assertEqual(len(decode.worker._jobs), 1)
        steps(decode, until=lambda: not decode.worker._jobs)

    def test_nothing_may_be_wanted_before_the_producer_pushes(self) -> None:
        prefill, decode = self.pair(transfer_mode="push")
        params = prefill.serve("r", TOKENS, THERE)
        self.assertEqual(decode.want("r", TOKENS, params, HERE, computed=TOKENS), 0)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            decode.step()
        with self.assertNoLogs(LOGGER, logging.ERROR):
            steps(prefill, decode, until=lambda: "r" in prefill.sent)
        stats = prefill.worker.take_stats()
        assert stats is not None
        self.assertEqual((stats.data["handed_over"], stats.data["failed_handovers"]), (1, 0))

    def test_windows_have_null_blocks_before_them(self) -> None:
        prefill, decode = self.engine("prefill", 32, window=32), self.engine("decode", 16, window=32)
        there, here = [[3, 7, 5, 1], [0, 0, 6, 2]], [HERE, [0, 0, 0, 0, 12, 13, 14]]
        prefill.write(0, there[0], range(TOKENS))
        for layer in range(1, LAYERS):
            prefill.write(layer, there[1], range(64, TOKENS))
        params = prefill.serve("r", TOKENS, *there)
        self.assertEqual(decode.want("r", TOKENS, params, *here), TOKENS)
        steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertEqual(decode.failed, set())
        self.assertEqual(decode.wrong(0, HERE, range(TOKENS)), 0)
        for layer in range(1, LAYERS):
            self.assertEqual(decode.wrong(layer, here[1], range(TOKENS - 32, TOKENS)), 0)
            self.assertFalse(decode.layers[f"model.layers.{layer}.attn"][0].any(), "the null block was written")


class Keys(Pairs):
    def keys(self, name: str) -> tuple[str, str]:
        """A file of keys, and the public key in it."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name) / name
        keys = kvferry.make_keys()
        path.write_text(json.dumps(keys._asdict()))
        return str(path), keys.public_key

    def test_both_have_keys_and_know_each_other(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                (there, their_key), (here, our_key) = self.keys("prefill"), self.keys("decode")
                self.hand_over(
                    self.engine(
                        "prefill", 32, key_file=there, allowed_keys=[our_key, their_key], transfer_mode=mode
                    ),
                    self.engine("decode", 16, key_file=here, allowed_keys=[our_key, their_key]),
                )

    def test_a_stranger_gets_nothing(self) -> None:
        (there, their_key), (here, _) = self.keys("prefill"), self.keys("decode")
        prefill = self.engine("prefill", 32, key_file=there, allowed_keys=[their_key])
        decode = self.engine("decode", 16, key_file=here, kv_load_deadline=2)
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        decode.want("r", TOKENS, prefill.serve("r", TOKENS, THERE), HERE)
        with self.says("r"):
            steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertEqual(decode.invalid, set(HERE))
        self.assertFalse(any(tensor.any() for tensor in decode.layers.values()))

    def test_who_may_give_commands_is_said_one_way(self) -> None:
        file, key = self.keys("engine")
        for extra, text in (
            ({"local_commands": True}, "local_commands is set together with key_file; .* command_keys"),
            ({"command_keys": [key]}, "command_keys is given without allowed_keys: "),
        ):
            with self.subTest(text), self.assertRaisesRegex(InvalidError, text):
                Half("engine", 16, key_file=file, **extra)


class Failing(Pairs):
    def test_blocks_that_failed_are_named_where_their_ids_are_unique(self) -> None:
        prefill, decode = self.engine("prefill", 32), self.engine("decode", 16, kv_load_deadline=1)
        params = prefill.serve("r", TOKENS, THERE)
        prefill.close()
        with self.says("r"):
            self.assertEqual(decode.want("r", TOKENS, params, HERE, computed=32), TOKENS - 32)
            steps(decode, until=lambda: "r" in decode.received)
        self.assertEqual((decode.invalid, decode.failed), (set(HERE[2:]), set()))

    def test_requests_that_failed_are_named_otherwise(self) -> None:
        prefill = self.engine("prefill", 32, window=32)
        decode = self.engine("decode", 16, window=32, kv_load_deadline=1)
        params = prefill.serve("r", TOKENS, THERE, THERE)
        prefill.close()
        with self.says("r"):
            decode.want("r", TOKENS, params, HERE, HERE)
            steps(decode, until=lambda: "r" in decode.received)
        self.assertEqual((decode.invalid, decode.failed), (set(), {"r"}))

    def test_another_model_is_refused_by_what_differs(self) -> None:
        prefill = self.engine("prefill", 32, window=64)
        decode = self.engine("decode", 16, window=32, kv_load_deadline=5)
        params = prefill.serve("r", TOKENS, THERE, THERE)
        with self.says("001.0.window_tokens"):
            decode.want("r", TOKENS, params, HERE, HERE)
            steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertEqual(decode.failed, {"r"})

    def test_one_request_fails_and_the_next_is_loaded(self) -> None:
        prefill, decode = self.pair(kv_load_patience=1)
        params = prefill.serve("lost", TOKENS, THERE)
        with self.says("patience", "in time"):  # whichever side notices it first
            decode.want("lost", TOKENS, {**params, "kvferry_transfer_id": "00"}, [12, 13, 14, 15, 1, 3, 5])
            steps(prefill, decode, until=lambda: "lost" in decode.received)
        self.assertNotIn("lost", prefill.sent)
        decode.invalid.clear()
        self.hand_over(prefill, decode, "next")

    def test_parameters_that_are_used_a_second_time_are_answered_at_once(self) -> None:
        """It is answered before patience and deadlines end: steps() does not wait for as long as those."""
        for mode in ("pull", "push"):
            with self.subTest(mode):
                self.use_twice(*self.pair(transfer_mode=mode), self.engine("another", 16))

    def use_twice(self, prefill: Half, decode: Half, another: Half) -> None:
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        params = prefill.serve("r", TOKENS, THERE)
        decode.want("r", TOKENS, params, HERE)
        steps(prefill, decode, until=lambda: "r" in decode.received and "r" in prefill.sent)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for half in (decode, another):
            with self.says("was handed over"):
                half.want("again", TOKENS, params, [12, 13, 14, 15, 1, 3, 5])
                steps(prefill, half, until=lambda half=half: "again" in half.received)
            self.assertEqual(half.invalid, {12, 13, 14, 15, 1, 3, 5})
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)

    def test_a_request_is_kept_for_as_many_decode_servers_as_the_proxy_asked_for(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                self.use_from_three(self.engine("prefill", 32, transfer_mode=mode))

    def use_from_three(self, prefill: Half) -> None:
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        params = prefill.serve("r", TOKENS, THERE, uses=2)
        for name in ("one", "two"):
            self.assertNotIn("r", prefill.sent)
            decode = self.engine(name, 16)
            self.assertEqual(decode.want("r", TOKENS, params, HERE), TOKENS)
            steps(prefill, decode, until=lambda decode=decode: "r" in decode.received)
            self.assertEqual((decode.failed, decode.invalid), (set(), set()))
            for layer in range(LAYERS):
                self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)
        steps(prefill, until=lambda: "r" in prefill.sent)
        third = self.engine("three", 16)
        with self.says("was handed over"):
            third.want("r", TOKENS, params, HERE)
            steps(prefill, third, until=lambda: "r" in third.received)
        self.assertEqual(third.invalid, set(HERE))

    def test_a_number_of_uses_that_makes_no_sense_is_refused(self) -> None:
        prefill = self.engine("prefill", 32)
        for uses, text in ((-1, "kvferry_uses is -1; allowed"), (65, "kvferry_uses is 65"), ("x", "'x'")):
            with self.subTest(uses), self.says(text), self.assertRaises(AssertionError):
                prefill.serve(f"r{uses}", TOKENS, THERE, uses=uses)

    def test_parameters_that_are_used_twice_at_once_are_loaded_once(self) -> None:
        """The children of a request for several answers do this."""
        prefill, decode = self.pair()
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        params = prefill.serve("r", TOKENS, THERE)
        decode.want("one", TOKENS, params, HERE)
        second = [12, 13, 14, 15, 1, 3, 5]
        decode.want("two", TOKENS, params, second)
        with self.says("already", "was handed over"):  # while the first is being read, or just after
            steps(prefill, decode, until=lambda: decode.received >= {"one", "two"} and "r" in prefill.sent)
        # If refused at once it fails as a whole; if the prefill engine refuses it, its blocks are named.
        self.assertIn((decode.failed, decode.invalid), [({"two"}, set()), (set(), set(second))])
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)

    def test_a_request_is_aborted_while_it_waits(self) -> None:
        prefill, decode = self.pair()
        params = prefill.serve("r", TOKENS, THERE)
        request = a_request("r", TOKENS, {**params, "kvferry_transfer_id": "00"})
        decode.scheduling.add(request)
        load, waits = decode.scheduling.match(request, 0)
        self.assertTrue(waits)
        decode.scheduling.allocated(request, blocks_of(HERE), load)
        decode.step()
        keep, given = decode.scheduling.finished(request, [HERE], False)
        self.assertEqual((keep, given), (True, None))
        steps(decode, until=lambda: "r" in decode.received)

    def test_a_request_is_aborted_before_a_worker_knows_of_it(self) -> None:
        prefill, decode = self.pair()
        request = a_request("r", TOKENS, prefill.serve("r", TOKENS, THERE))
        decode.scheduling.add(request)
        load, _ = decode.scheduling.match(request, 0)
        decode.scheduling.allocated(request, blocks_of(HERE), load)
        keep, _ = decode.scheduling.finished(request, [HERE], False)
        told = decode.step()
        self.assertEqual([item.kind for item in told.instructions], [InstructionKind.NOTIFY])
        steps(prefill, decode, until=lambda: "r" in prefill.sent)
        # vLLM frees the blocks either at once, or when the worker reports.
        self.assertTrue(not keep or "r" in decode.received)

    def test_blocks_are_kept_while_a_request_waits_for_room(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                self.wait_for_room(*self.pair(kv_lease_duration=3, transfer_mode=mode))

    def wait_for_room(self, prefill: Half, decode: Half) -> None:
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        request = a_request("r", TOKENS, prefill.serve("r", TOKENS, THERE))
        decode.scheduling.add(request)
        end = time.monotonic() + 4  # longer than the lease, which must not pass between two steps
        while time.monotonic() < end:  # asked again in each step, without blocks
            self.assertEqual(decode.scheduling.match(request, 0), (TOKENS, True))
            prefill.step()
            decode.step()
        decode.scheduling.allocated(request, blocks_of(HERE), TOKENS)
        steps(prefill, decode, until=lambda: "r" in decode.received and "r" in prefill.sent)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)

    def test_a_request_that_was_not_read_in_time_is_freed(self) -> None:
        prefill = self.engine("prefill", 32, kv_lease_duration=0.5)
        prefill.serve("r", TOKENS, THERE)
        with self.says("r"):
            steps(prefill, until=lambda: "r" in prefill.sent)

    def test_a_preempted_request_is_computed_or_loaded_but_never_both(self) -> None:
        prefill, decode = self.pair()
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        request = a_request("r", TOKENS, prefill.serve("r", TOKENS, THERE))
        decode.scheduling.add(request)
        load, _ = decode.scheduling.match(request, 0)
        decode.scheduling.allocated(request, blocks_of(HERE), load)
        steps(prefill, decode, until=lambda: "r" in decode.received)
        decode.step(preempted=("r",))
        self.assertEqual(decode.scheduling.match(request, 0), (0, False))
        decode.scheduling.allocated(request, blocks_of([12, 13, 14, 15, 1, 3, 5]), 0)
        self.assertEqual(decode.step().instructions, [])
        self.assertEqual(decode.scheduling.finished(request, [HERE], True), (False, None))

    def test_a_request_whose_blocks_lack_some_is_computed_and_not_asked_for_again(self) -> None:
        """vLLM asks again after a load that has failed: it would do so for ever."""
        prefill, decode = self.pair()
        request = a_request("r", TOKENS, prefill.serve("r", TOKENS, THERE))
        decode.scheduling.add(request)
        load, _ = decode.scheduling.match(request, 0)
        with self.says("request r: group 000.0: tokens [0, 100) are in blocks [0, 6]"):
            decode.scheduling.allocated(request, blocks_of(HERE[:2]), load)
        told = decode.scheduling.step(output_of())
        decode.worker.start(told)
        self.assertEqual(decode.worker.take_results().failed_recving, {"r"})
        self.assertEqual(decode.scheduling.match(request, 0), (0, False))
        # An asynchronous scheduler hears of its end before the worker's report.
        self.assertEqual(decode.scheduling.finished(request, [HERE[:2]], False), (False, None))
        self.assertEqual(decode.scheduling.step(output_of()).void, [])
        steps(prefill, decode, until=lambda: "r" in prefill.sent)

    def test_a_push_that_cannot_begin_is_reported_once_when_it_has_ended(self) -> None:
        prefill, _ = self.pair(transfer_mode="push", kv_load_deadline=5)
        prefill.serve("r", TOKENS, THERE)
        reported: list[str] = []
        refuse = mock.patch.object(
            prefill.worker._agent, "push_ready", side_effect=InputOutputError("no event")
        )
        with self.says("request r: no event (cancelled by its engine)"), refuse:
            prefill.step()
        while prefill.worker._jobs:
            reported += prefill.sent
            prefill.sent.clear()
            prefill.step()
        self.assertEqual([*reported, *prefill.sent], ["r"])

    def test_a_reserved_load_that_cannot_begin_lets_go_of_the_producers_blocks(self) -> None:
        prefill, decode = self.pair()
        request = a_request("r", TOKENS, prefill.serve("r", TOKENS, THERE))
        decode.scheduling.add(request)
        steps(prefill, decode, until=lambda: any(kept.moves for kept in prefill.worker._agent.kept()))
        load, _ = decode.scheduling.match(request, 0)
        decode.scheduling.allocated(request, blocks_of(HERE), load)
        refuse = mock.patch.object(decode.worker._agent, "pull_into", side_effect=InputOutputError("no event"))
        with self.says("request r: PULL: no event"), refuse:
            decode.step()
        self.assertEqual((decode.received, decode.failed), ({"r"}, {"r"}))
        with self.says("decode rank 0 gave the request up"):
            steps(prefill, decode, until=lambda: not decode.worker._jobs and "r" in prefill.sent)


class BadInput(Pairs):
    def test_params_that_make_no_sense_are_named(self) -> None:
        prefill, decode = self.pair()
        params = prefill.serve("r", TOKENS, THERE)
        for i, (field, value, text) in enumerate(
            [
                ("remote_port", None, "remote_port"),
                ("remote_port", 65536, "remote_port is 65536; allowed: 1 to 65535"),
                ("remote_port", "http", "remote_port is 'http'"),
                ("remote_host", None, "remote_host"),
                ("remote_engine_id", None, "remote_engine_id"),
                ("remote_num_tokens", -1, "remote_num_tokens is -1"),
                ("remote_num_tokens", "many", "remote_num_tokens is 'many'"),
                ("remote_num_tokens", [1], "remote_num_tokens is [1]"),
                ("remote_num_tokens", math.inf, "remote_num_tokens is inf; allowed: 0 to"),  # 1e999 in JSON
                ("kvferry_transfer_id", "xyz", "kvferry_transfer_id is 'xyz'"),
                ("kvferry_transfer_id", 17, "kvferry_transfer_id is 17"),
                ("kvferry_transfer_id", "00" * 2000, "1024"),
                ("remote_registration_generation", -1, "remote_registration_generation is -1; allowed: 0 to"),
                ("remote_registration_generation", "last", "remote_registration_generation is 'last'"),
                ("transfer_mode", "carry", "transfer_mode is 'carry'; allowed: pull, push"),
            ]
        ):
            with self.subTest(field=field, value=value), self.says(text):
                self.assertEqual(decode.want(f"r{i}", TOKENS, {**params, field: value}, HERE), 0)
        decode.step()
        self.assertEqual((decode.received, decode.failed), (set(), set()))

    def test_a_prompt_is_only_shortened_if_it_will_be_handed_over(self) -> None:
        engine = self.engine("prefill", 32)
        engine.config.num_prefill_lookahead_tokens = 3
        for name, left, answer in (("r", TOKENS - 2, 1), ("x" * 961, TOKENS, 16)):
            request = a_request(name, TOKENS, {"do_remote_decode": True})
            with self.assertNoLogs(LOGGER) if left < TOKENS else self.says("the id has 961 bytes"):
                engine.scheduling.add(request)
            tokens = (request.num_prompt_tokens, len(request.prompt_token_ids), len(request._all_token_ids))
            self.assertEqual((tokens, request.max_tokens), ((left, left, left), answer))

    def test_the_producer_has_more_tokens_than_the_prompt(self) -> None:
        prefill, decode = self.pair()
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        params = prefill.serve("r", TOKENS, THERE)
        self.assertEqual(decode.want("r", 60, params, HERE[:4]), 60)
        steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(60)), 0)

    def test_the_producer_says_more_than_it_has(self) -> None:
        prefill, decode = self.pair(kv_load_deadline=2)
        params = prefill.serve("r", TOKENS, THERE)
        with self.says("r"):
            forged = {**params, "remote_num_tokens": 120, "kvferry_prompt": None}
            load = decode.want("r", 120, forged, [*HERE, 13])
            self.assertEqual(load, 120)
            steps(prefill, decode, until=lambda: "r" in decode.received)
        self.assertIn(13, decode.invalid)

    def test_a_request_that_cannot_be_handed_over_is_forgotten(self) -> None:
        prefill, decode = self.engine("prefill", 32), self.engine("decode", 16, bidirectional_kv_xfer=True)
        with self.says("request short cannot be handed over"), self.assertRaises(AssertionError):
            prefill.serve("short", TOKENS, THERE[:2])
        self.assertEqual(prefill.scheduling._schedule.counts.requests, 0)
        request = a_request("turn", TOKENS, prefill.serve("r", TOKENS, THERE))
        decode.scheduling.add(request)
        load, _ = decode.scheduling.match(request, 0)
        decode.scheduling.allocated(request, blocks_of(HERE), load)
        steps(prefill, decode, until=lambda: "turn" in decode.received)
        request.num_computed_tokens, request.num_tokens = TOKENS, TOKENS + 1
        with self.says("request turn cannot be handed over"):
            self.assertEqual(decode.scheduling.finished(request, [HERE[:2]], True), (False, None))
        self.assertEqual(decode.scheduling._schedule.counts.requests, 0)
        self.assertFalse(decode.scheduling._turns.wants("turn"))

    def test_settings_that_make_no_sense_are_named(self) -> None:
        for extra, text in (
            ({"side_channel_port": 70000}, "side_channel_port is 70000"),
            ({"side_channel_port": "x"}, "side_channel_port is 'x'"),
            ({"side_channel_host": "10.0.0.1"}, "key_file"),
            ({"side_channel_host": "0.0.0.0", "insecure": True}, "side_channel_host is '0.0.0.0', which"),
            ({"side_channel_host": "[::]", "insecure": True}, "side_channel_host is '::', which stands"),
            ({"kv_lease_duration": -1}, "kv_lease_duration is -1"),
            ({"kv_load_deadline": "soon"}, "kv_load_deadline is 'soon'"),
            ({"kv_load_deadline": float("inf")}, "kv_load_deadline is inf"),
            ({"kv_load_patience": True}, "kv_load_patience is True"),
            ({"insecure": "false"}, "insecure is 'false'; allowed: true, false"),
            ({"verify": 1}, "verify is 1; allowed: true, false"),
            ({"alowed_keys": ["x"]}, "alowed_keys is no setting .*do you mean allowed_keys"),
            ({"kv_buffer": 5}, "kv_buffer is no setting of the kvferry connector; allowed in .*key_file"),
            ({"transfer_mode": "carry"}, "transfer_mode is 'carry'"),
            ({"key_file": "no such file"}, "key_file no such file"),
            ({"allowed_keys": "x"}, "allowed_keys is 'x'"),
            ({"allowed_keys": ["x"]}, "key_file"),
            ({"local_commands": "yes"}, "local_commands is 'yes'; allowed: true, false"),
            ({"local_commands": True, "insecure": True}, "local_commands is set together with insecure"),
            ({"command_keys": "x"}, "command_keys is 'x'; allowed: a list of public keys"),
            ({"command_keys": ["x"]}, "command_keys is given without key_file: .* see local_commands"),
        ):
            with self.subTest(text), self.assertRaisesRegex(InvalidError, text):
                Half("engine", 16, **extra)

    def test_a_port_leaves_room_for_the_data_parallel_index(self) -> None:
        config = self.engine("engine", 16, side_channel_port=65534).config
        config.parallel_config.data_parallel_index = 1
        self.assertEqual(read_settings(config).port, 65535)
        config.parallel_config.data_parallel_index = 2
        allowed = (
            r"side_channel_port is 65534; allowed: 0 \(any\) to 65533, as the data-parallel index, 2, is added"
        )
        with self.assertRaisesRegex(InvalidError, allowed):
            read_settings(config)

    def test_a_server_whose_role_loads_nothing_computes_and_keeps_no_turns(self) -> None:
        """vLLM keeps its own steps from writing into blocks that are loaded only where the role has loads."""
        prefill, decode = self.engine("prefill", 16), self.engine("decode", 16)
        params = prefill.serve("p", 40, [1, 2, 3])
        transfer = decode.config.kv_transfer_config
        transfer.kv_role, transfer.is_kv_consumer = "kv_producer", False
        with self.assertLogs("vllm.kvferry", "ERROR") as log:
            self.assertEqual(decode.want("d", 40, params, [4, 5, 6]), 0)
        self.assertIn("request d is computed here: kv_role is kv_producer", "\n".join(log.output))
        transfer.kv_connector_extra_config["bidirectional_kv_xfer"] = True
        with self.assertRaisesRegex(InvalidError, "bidirectional_kv_xfer is set in the role kv_producer"):
            read_settings(decode.config)
        transfer.is_kv_consumer = True
        self.assertTrue(read_settings(decode.config).turns)

    def test_environment_variables_say_where_to_listen(self) -> None:
        engine = self.engine("engine", 16)
        with mock.patch.dict("os.environ", KVFERRY_SIDE_CHANNEL_PORT="5", KVFERRY_SIDE_CHANNEL_HOST="::1"):
            found = read_settings(engine.config)
        self.assertEqual((found.host, found.port), ("::1", 5))


class BesideOthers(unittest.TestCase):
    def test_an_engine_that_is_asked_for_one_group_hands_over_as_well(self) -> None:
        asked: Any = mock.Mock()
        asked.finished.return_value = (True, {"remote_port": 1})
        connector = KvferryConnector.__new__(KvferryConnector)
        connector._scheduling = asked
        request: Any = SimpleNamespace(status=RequestStatus.FINISHED_LENGTH_CAPPED)
        self.assertEqual(connector.request_finished(request, [4, 2]), (True, {"remote_port": 1}))
        asked.finished.assert_called_once_with(request, ([4, 2],), True)


if __name__ == "__main__":
    unittest.main()
