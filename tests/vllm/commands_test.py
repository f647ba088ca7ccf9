"""Commands of an operator to engines: they are done although no engine steps, and no other event is lost."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from halves import LAYERS, Half, output_of, steps
from many_ranks import ManyRanks

import kvferry
from kvferry.commands import DRAIN, HAND_OVER, KEPT, LIST, RESUME, TAKE_OVER, Command, Reply, ask
from kvferry.contact import Contact, KeyPair
from kvferry.errors import CancelledError, Status
from kvferry.events import EventKind
from kvferry.vllm.commands import PARAMS, Commands

TOKENS = 100
THERE, HERE = [3, 7, 5, 1], [9, 2, 4, 8, 6, 10, 11]  # blocks of 32 and of 16 tokens
LOGGER = "vllm.kvferry"
PATIENCE = 30.0


def place(engine: Any, name: str = "prefill", key: str | None = None) -> Contact:
    """Where an engine is met."""
    directory = engine.scheduling._directory
    assert directory is not None
    return Contact(name, directory.endpoint, key)


def only(replies: list[Reply]) -> Reply:
    (reply,) = replies
    return reply


def tell(engine: Any, verb: str, request: str = "", name: str = "prefill", **options: Any) -> Reply:
    """The reply of an engine of one rank, which does not step meanwhile."""
    return only(ask(place(engine, name), verb, request, timeout=PATIENCE, **options))


class Engines(unittest.TestCase):
    """A prefill and a decode engine of one rank each."""

    def engine(self, *arguments: Any, **extra: Any) -> Half:
        half = Half(*arguments, **extra)
        self.addCleanup(half.close)
        return half

    def pair(self, **extra: Any) -> tuple[Half, Half]:
        extra = {"local_commands": True, **extra}
        return self.engine("prefill", 32, **extra), self.engine("decode", 16, **extra)

    def keep(self, prefill: Half, name: str = "r") -> dict[str, Any]:
        """A request that the prefill engine keeps for a peer. Returns its parameters."""
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        params = prefill.serve(name, TOKENS, THERE)
        prefill.step()
        return params

    def load(self, decode: Half, params: dict[str, Any], name: str = "r") -> None:
        """Lets the decode engine load a request; only the decode engine steps."""
        self.assertEqual(decode.want(name, TOKENS, params, HERE), TOKENS)
        steps(decode, until=lambda: name in decode.received)

    def assert_loaded(self, decode: Half) -> None:
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)
            decode.layers[f"model.layers.{layer}.attn"].zero_()

    def hand_over(self, prefill: Half, decode: Half, name: str) -> None:
        """A request goes from one to the other, and every cell arrives."""
        self.load(decode, self.keep(prefill, name), name)
        steps(prefill, until=lambda: name in prefill.sent)
        self.assert_loaded(decode)

    def begin_drain(self, prefill: Half, **options: Any) -> Future[Reply]:
        """Lets another thread drain an engine; returns when the drain is under way."""
        pool = ThreadPoolExecutor(1)
        self.addCleanup(pool.shutdown)
        asked = pool.submit(tell, prefill, DRAIN, **options)
        commands = prefill.worker._commands
        assert commands is not None
        self.until(lambda: bool(commands._drains))
        return asked

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.001)


class Draining(Engines):
    def test_an_idle_engine_drains_and_takes_nothing_new(self) -> None:
        prefill, decode = self.pair()
        self.assertEqual(tell(prefill, DRAIN), Reply(Status.OK, "", ()))
        with self.assertLogs(LOGGER, logging.WARNING) as log:
            self.load(decode, self.keep(prefill))
        self.assertTrue(any("request r: HOLD: the agent drains" in line for line in log.output), log.output)
        self.assertTrue(any("the engine drains" in line for line in log.output), log.output)
        self.assertEqual(prefill.sent, {"r"})  # vLLM frees its blocks
        self.assertEqual(decode.invalid, set(HERE))
        self.assertEqual(tell(prefill, DRAIN).detail, "it had drained before")

    def test_an_engine_that_has_drained_serves_again(self) -> None:
        prefill, decode = self.pair()
        for turn in range(3):
            self.assertEqual(tell(prefill, DRAIN).status, Status.OK)
            self.assertEqual(tell(decode, DRAIN, name="decode").status, Status.OK)
            self.assertEqual(tell(decode, RESUME, name="decode"), Reply(Status.OK, "", ()))
            self.assertEqual(tell(prefill, RESUME).status, Status.OK)
            self.hand_over(prefill, decode, f"r{turn}")
        self.assertEqual(tell(prefill, RESUME).status, Status.OK)  # it serves

    def test_a_drain_ends_when_peers_have_what_is_kept(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                prefill, decode = self.pair(transfer_mode=mode)
                params = self.keep(prefill)
                asked = self.begin_drain(prefill, deadline=PATIENCE)
                self.assertFalse(asked.done())
                self.load(decode, params)
                self.assertEqual(asked.result(PATIENCE), Reply(Status.OK, "", ()))
                self.assert_loaded(decode)
                self.assertEqual(prefill.sent, set())  # it has not stepped
                prefill.step()
                self.assertEqual(prefill.sent, {"r"})
                self.assertEqual(prefill.worker._jobs, {})

    def test_what_no_peer_takes_is_cancelled_in_time(self) -> None:
        prefill, decode = self.pair()
        params = self.keep(prefill)
        reply = tell(prefill, DRAIN, deadline=0.2)
        self.assertEqual(reply.status, Status.TIMEOUT)
        self.assertIn("1 requests were cancelled", reply.detail)
        with self.assertLogs(LOGGER, logging.WARNING) as log:
            prefill.step()
        self.assertIn("request r: it had not ended when the time to drain was over", "\n".join(log.output))
        self.assertEqual(prefill.sent, {"r"})
        self.assertEqual(tell(prefill, RESUME).status, Status.OK)
        with self.assertLogs(LOGGER, logging.WARNING):  # it stays cancelled
            self.load(decode, params)
        self.assertEqual(decode.invalid, set(HERE))

    def test_a_drain_that_is_taken_back_says_so(self) -> None:
        prefill, decode = self.pair()
        params = self.keep(prefill)
        asked = self.begin_drain(prefill, deadline=PATIENCE)
        self.assertEqual(tell(prefill, RESUME).status, Status.OK)
        self.assertEqual(asked.result(PATIENCE), Reply(Status.CANCELLED, "it was resumed", ()))
        again = self.begin_drain(prefill, deadline=PATIENCE)
        self.load(decode, params)
        self.assertEqual(again.result(PATIENCE).status, Status.OK)
        self.assert_loaded(decode)

    def test_all_who_ask_are_told(self) -> None:
        prefill, decode = self.pair()
        params = self.keep(prefill)
        first, second = self.begin_drain(prefill, deadline=3.0), self.begin_drain(prefill, deadline=PATIENCE)
        commands = prefill.worker._commands
        assert commands is not None
        self.until(lambda: len(commands._drains) == 2)
        time.sleep(3.5)  # the later command has set the time anew
        self.load(decode, params)
        self.assertEqual([asked.result(PATIENCE).status for asked in (first, second)], [Status.OK] * 2)
        self.assert_loaded(decode)


class Keeping(Engines):
    """Handing over what is kept."""

    def params_of(self, reply: Reply) -> dict[str, Any]:
        self.assertEqual((reply.status, [record.name for record in reply.records]), (Status.OK, [PARAMS]))
        params = json.loads(reply.records[0].data)
        assert isinstance(params, dict)
        return params

    def test_the_reply_has_what_another_engine_needs(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                prefill, decode = self.pair(transfer_mode=mode)
                params = self.keep(prefill)
                found = self.params_of(tell(prefill, HAND_OVER, "r"))
                self.assertEqual(found, {**params, "remote_block_ids": []})
                self.load(decode, found)
                self.assert_loaded(decode)

    def test_an_engine_that_drains_hands_over_what_it_keeps(self) -> None:
        prefill, decode = self.pair()
        self.keep(prefill)
        asked = self.begin_drain(prefill, deadline=PATIENCE)
        self.load(decode, self.params_of(tell(prefill, HAND_OVER, "r")))
        self.assertEqual(asked.result(PATIENCE).status, Status.OK)
        self.assert_loaded(decode)

    def test_the_command_prints_it(self) -> None:
        prefill, decode = self.pair()
        params = self.keep(prefill)
        run = subprocess.run(
            [sys.executable, "-m", "kvferry", "ask", place(prefill).endpoint, "hand-over", "r"],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        )
        said, printed = run.stdout.splitlines()
        self.assertEqual(said, "prefill holds r")
        found = json.loads(printed.removeprefix(f"{PARAMS} "))
        self.assertEqual(found, {**params, "remote_block_ids": []})
        self.load(decode, found)
        self.assert_loaded(decode)

    def refused(self, engine: Half, request: str, text: str, name: str = "prefill") -> None:
        reply = tell(engine, HAND_OVER, request, name)
        self.assertEqual((reply.status, reply.records), (Status.NOT_FOUND, ()))
        self.assertRegex(reply.detail, text)

    def test_what_is_not_kept_is_refused_by_name(self) -> None:
        prefill, decode = self.pair()
        self.refused(prefill, "nobody", "no request nobody is kept here")
        self.load(decode, self.keep(prefill))
        gone = "request r is not kept any more: its consumers have it"
        self.refused(prefill, "r", gone)
        prefill.step()
        self.refused(prefill, "r", gone)
        self.keep(prefill, "q")
        self.assertEqual(tell(prefill, DRAIN, deadline=0.1).status, Status.TIMEOUT)
        cancelled = "request q is not kept any more: .*time to drain was over"
        self.refused(prefill, "q", cancelled)
        with self.assertLogs(LOGGER, logging.WARNING):
            prefill.step()
            self.refused(prefill, "q", cancelled)
            self.keep(prefill, "p")
        self.refused(prefill, "p", "request p is not kept any more: the agent drains")

    def test_what_is_being_loaded_is_refused(self) -> None:
        prefill, decode = self.pair()
        params = self.keep(prefill)
        never = {**params, "kvferry_transfer_id": "00" * 16}
        decode.want("r", TOKENS, never, HERE)
        decode.step()
        self.refused(decode, "r", "request r is being loaded here", "decode")

    def test_of_many_that_have_gone_the_latest_are_remembered(self) -> None:
        prefill, _ = self.pair()
        for number in range(1030):
            prefill.worker._went(f"r{number}", "its consumers have it")
        self.refused(prefill, "r5", "no request r5 is kept here")
        self.refused(prefill, "r6", "its consumers have it")
        self.refused(prefill, "r1029", "its consumers have it")

    def test_vllm_says_how_it_takes_a_request_over(self) -> None:
        prefill, _ = self.pair()
        reply = tell(prefill, TAKE_OVER, "r", peer=place(prefill))
        self.assertEqual(reply.status, Status.UNSUPPORTED)
        self.assertIn("send it to this server's HTTP port, with the kv_transfer_params", reply.detail)
        reply = tell(prefill, "dance")
        self.assertEqual(
            reply,
            Reply(
                Status.UNSUPPORTED,
                "vLLM does not dance; this worker takes drain, resume, list and hand over",
                (),
            ),
        )


class Listing(Engines):
    """Listing what is kept."""

    def listed(self, engine: Half, beginning: str = "", name: str = "prefill") -> dict[str, Any]:
        reply = tell(engine, LIST, beginning, name)
        self.assertEqual((reply.status, [record.name for record in reply.records]), (Status.OK, [KEPT]))
        found = json.loads(reply.records[0].data)
        assert isinstance(found, dict)
        self.assertEqual(found["count"], len(found["kept"]))
        return {one.pop("request"): one for one in found["kept"]}

    def printed(self, engine: Half, *names: str) -> list[str]:
        """The lines of the command's list."""
        ask_for = [sys.executable, "-m", "kvferry", "ask", place(engine).endpoint, "list", *names]
        found = subprocess.run(ask_for, capture_output=True, text=True, check=True, timeout=PATIENCE)
        return found.stdout.splitlines()

    def test_what_is_kept_is_listed_by_vllms_names(self) -> None:
        for mode in ("pull", "push"):
            with self.subTest(mode):
                prefill, decode = self.pair(transfer_mode=mode, kv_lease_duration=20)
                self.assertEqual(self.listed(prefill), {})
                self.keep(prefill, "cmpl-1")
                prefill.serve("cmpl-2", 40, [8, 9], uses=3)
                params = self.keep(prefill, "chat-1")
                found = self.listed(prefill)
                self.assertEqual(list(found), ["cmpl-1", "cmpl-2", "chat-1"])
                self.assertEqual([one["tokens"] for one in found.values()], [TOKENS, 40, TOKENS])
                self.assertEqual([one["consumers"] for one in found.values()], [1, 3, 1])
                for one in found.values():
                    self.assertEqual((one["served"], one["moves"]), (0, False))
                    self.assertTrue(0 <= one["age_s"] < 10 < one["left_s"] <= 120, one)
                self.assertEqual(list(self.listed(prefill, "cmpl-")), ["cmpl-1", "cmpl-2"])
                self.assertEqual(self.listed(prefill, "mpl"), {})
                self.load(decode, params, "chat-1")
                self.assertEqual(list(self.listed(prefill)), ["cmpl-1", "cmpl-2"])
                self.assertEqual(self.listed(decode, name="decode"), {})

    def test_what_is_being_loaded_is_not_kept(self) -> None:
        prefill, decode = self.pair()
        params = self.keep(prefill)
        decode.want("r", TOKENS, {**params, "kvferry_transfer_id": "00" * 16}, HERE)
        decode.step()
        self.assertEqual(self.listed(decode, name="decode"), {})

    def test_the_command_prints_a_table(self) -> None:
        prefill, _ = self.pair(kv_lease_duration=300)
        self.keep(prefill, "cmpl-1")
        self.keep(prefill, "cmpl-\x1b[2J\u00e9")
        head, titles, first, second = self.printed(prefill)
        self.assertEqual(head, "prefill, rank 0, keeps 2 requests")
        self.assertEqual(titles.split(), ["request", "tokens", "age", "left", "served", "moves"])
        self.assertRegex(first, r"^  cmpl-1 +100 +\S+ m?s +2[0-9]{2}\.\d+ s +0 of 1 +no$")
        self.assertTrue(second.startswith("  cmpl-?[2J?? "), second)
        self.assertEqual(self.printed(prefill, "cmpl-2"), ["prefill, rank 0, keeps 0 requests"])

    def test_a_long_lease_is_printed_in_hours(self) -> None:
        prefill, _ = self.pair(kv_lease_duration=86400)
        self.keep(prefill, "cmpl-1")
        self.assertRegex(self.printed(prefill)[2], r"^  cmpl-1 +100 +\S+ m?s +24\.0 h +0 of 1 +no$")


class Allowing(Engines):
    """Who may give commands."""

    def test_without_the_setting_nobody_may(self) -> None:
        prefill, decode = self.pair(local_commands=False)
        self.assertIsNone(prefill.worker._commands)
        params = self.keep(prefill)
        for verb in (DRAIN, RESUME, LIST, HAND_OVER):
            reply = tell(prefill, verb, "r" if verb == HAND_OVER else "")
            self.assertEqual(reply.status, Status.PERMISSION)
            self.assertIn("local_commands is not set", reply.detail)
        prefill.serve("q", TOKENS, THERE)
        self.assertEqual(prefill.scheduling.step(output_of()).params, {})
        self.load(decode, params)
        self.assert_loaded(decode)

    def keys(self, name: str) -> tuple[str, KeyPair]:
        """A file of keys, and the keys in it."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name) / name
        keys = kvferry.make_keys()
        path.write_text(json.dumps(keys._asdict()))
        return str(path), keys

    def test_a_key_needs_the_right(self) -> None:
        (there, prefill_keys), (here, decode_keys), (_, operator) = map(self.keys, ("p", "d", "o"))
        stranger = kvferry.make_keys()
        peers = [prefill_keys.public_key, decode_keys.public_key]
        prefill = self.engine(
            "prefill", 32, key_file=there, allowed_keys=peers, command_keys=[operator.public_key]
        )
        decode = self.engine("decode", 16, key_file=here, allowed_keys=peers)
        contact = place(prefill, key=prefill_keys.public_key)
        params = self.keep(prefill)
        for keys in (decode_keys, prefill_keys):
            reply = only(ask(contact, DRAIN, keys=keys, timeout=PATIENCE))
            self.assertEqual(reply.status, Status.PERMISSION)
            self.assertIn("does not allow this key to give commands", reply.detail)
        with self.assertRaises(kvferry.NotPermittedError):
            ask(contact, DRAIN, keys=stranger, timeout=5.0)
        reply = only(ask(contact, HAND_OVER, "r", keys=operator, timeout=PATIENCE))
        self.assertEqual(reply.status, Status.OK)
        self.assertEqual(json.loads(reply.records[0].data)["kvferry_public_key"], params["kvferry_public_key"])
        refused = only(
            ask(place(decode, "decode", decode_keys.public_key), DRAIN, keys=prefill_keys, timeout=PATIENCE)
        )
        self.assertEqual(refused.status, Status.PERMISSION)
        self.load(decode, params)
        self.assert_loaded(decode)


class Ending(Engines):
    """Workers that end or sleep while commands are heeded."""

    def test_an_engine_that_has_drained_ends_at_once(self) -> None:
        prefill, _ = self.pair(kv_drain_duration=PATIENCE)
        self.keep(prefill)
        self.assertEqual(tell(prefill, DRAIN, deadline=0.1).status, Status.TIMEOUT)
        begun = time.monotonic()
        with self.assertLogs(LOGGER, logging.WARNING):
            prefill.close()
        self.assertLess(time.monotonic() - begun, PATIENCE / 2)
        self.assertEqual(prefill.worker._jobs, {})
        prefill.worker.close()  # a second time has no further effect

    def test_a_drain_under_way_ends_with_the_engine(self) -> None:
        prefill, decode = self.pair(kv_drain_duration=PATIENCE)
        params = self.keep(prefill)
        asked = self.begin_drain(prefill, deadline=PATIENCE)
        ends = threading.Thread(target=prefill.worker.close)
        ends.start()
        self.load(decode, params)
        ends.join()
        self.assertEqual(asked.result(PATIENCE).status, Status.OK)
        self.assert_loaded(decode)

    def test_an_engine_that_ends_takes_no_more_commands(self) -> None:
        prefill, decode = self.pair(kv_drain_duration=PATIENCE)
        params = self.keep(prefill)
        ends = threading.Thread(target=prefill.worker.close)
        ends.start()
        commands = prefill.worker._commands
        assert commands is not None
        self.until(lambda: commands._ends)
        for verb in (RESUME, DRAIN):
            self.assertEqual(tell(prefill, verb), Reply(Status.CANCELLED, "this worker ends", ()))
        self.load(decode, params)
        ends.join()
        self.assert_loaded(decode)

    def test_an_engine_that_was_resumed_drains_when_it_ends(self) -> None:
        prefill, decode = self.pair(kv_drain_duration=PATIENCE)
        self.assertEqual(tell(prefill, DRAIN).status, Status.OK)
        self.assertEqual(tell(prefill, RESUME).status, Status.OK)
        params = self.keep(prefill)
        ends = threading.Thread(target=prefill.worker.close)
        ends.start()
        self.load(decode, params)
        ends.join()
        self.assert_loaded(decode)

    def test_an_engine_that_sleeps_heeds_commands(self) -> None:
        prefill, decode = self.pair()
        self.hand_over(prefill, decode, "before")
        self.keep(prefill)
        with self.assertLogs(LOGGER, logging.WARNING) as log:
            prefill.worker.sleep()
        self.assertTrue(any("request r" in line for line in log.output), log.output)
        reply = tell(prefill, HAND_OVER, "r")
        self.assertIn("request r is not kept any more", reply.detail)
        self.assertEqual(tell(prefill, DRAIN).status, Status.OK)
        self.assertEqual(tell(prefill, RESUME).status, Status.OK)
        prefill.worker.wake()
        steps(prefill, until=lambda: "r" in prefill.sent)
        self.load(decode, self.keep(prefill, "first"), "first")  # may fail: only then does the peer notice
        decode.invalid.clear()
        self.hand_over(prefill, decode, "after")

    def test_a_drain_ends_while_the_worker_waits_for_its_transfers(self) -> None:
        prefill, decode = self.pair(kv_drain_duration=PATIENCE)
        params = self.keep(prefill)
        sleeps = threading.Thread(target=prefill.worker.sleep)
        sleeps.start()
        asked = self.begin_drain(prefill, deadline=PATIENCE)
        self.load(decode, params)
        sleeps.join()
        self.assertEqual(asked.result(PATIENCE).status, Status.OK)
        self.assert_loaded(decode)
        prefill.step()
        self.assertEqual(prefill.sent, {"r"})


class ManyDoors(unittest.TestCase):
    """An engine of several ranks: each has its own door; who asks where the engine is met asks them all."""

    def test_all_ranks_are_asked(self) -> None:
        prefill = ManyRanks("prefill", 32, tp=2, local_commands=True)
        decode = ManyRanks("decode", 16, tp=1)
        for engine in (prefill, decode):
            self.addCleanup(engine.close)
            engine.start()
        prefill.write(THERE, range(TOKENS))
        params = prefill.serve("r", TOKENS, THERE)
        prefill.step()
        replies = ask(place(prefill), HAND_OVER, "r", timeout=PATIENCE)
        self.assertEqual([reply.status for reply in replies], [Status.OK] * 2)
        first, second = (json.loads(reply.records[0].data) for reply in replies)
        self.assertEqual(first, second)
        self.assertEqual(first, {**params, "remote_block_ids": []})
        self.assertEqual(decode.want("r", TOKENS, first, HERE), TOKENS)
        steps(decode, until=lambda: "r" in decode.received)  # type: ignore[arg-type]
        self.assertEqual((decode.failed, decode.invalid, decode.wrong(HERE, range(TOKENS))), (set(), set(), 0))
        self.assertEqual(
            [reply.status for reply in ask(place(prefill), DRAIN, timeout=PATIENCE)], [Status.OK] * 2
        )
        for worker in prefill.workers:
            assert worker._agent is not None
            with self.assertRaisesRegex(CancelledError, "drains"):
                worker._agent.hold(b"another", [])
        replies = ask(place(prefill), RESUME, timeout=PATIENCE)
        self.assertEqual([reply.status for reply in replies], [Status.OK] * 2)


class FakeAgent:
    """An agent whose events a test makes."""

    def __init__(self) -> None:
        self.readable = os.eventfd(0)
        self.queue: deque[Any] = deque()
        self.replies: list[tuple[Any, Status]] = []

    def put(self, event: Any) -> None:
        self.queue.append(event)
        os.eventfd_write(self.readable, 1)

    def fileno(self) -> int:
        return self.readable

    def events(self) -> Iterator[Any]:
        os.eventfd_write(self.readable, 1)
        os.eventfd_read(self.readable)
        while self.queue:
            yield self.queue.popleft()

    def wait(self, timeout: float) -> bool:
        return bool(self.queue)

    def reply(self, command: Command, status: Status, detail: str, records: Any) -> None:
        self.replies.append((command, status))


class Sorting(unittest.TestCase):
    """The events between the commands."""

    def test_other_events_come_in_their_order_and_none_is_lost(self) -> None:
        agent: Any = FakeAgent()
        commands = Commands(agent, self.fail, self.fail)
        found: list[int] = []
        for number in range(3000):
            is_command = number % 7 == 0
            command = SimpleNamespace(verb="dance", number=number, request=b"") if is_command else None
            agent.put(SimpleNamespace(command=command, kind=EventKind.DONE, ticket=number))
            if number % 100 == 0:
                commands.wait(0.0001)
                found += [event.ticket for event in commands.events()]
            if number == 2000:
                deadline = time.monotonic() + PATIENCE
                while not agent.replies and time.monotonic() < deadline:  # the thread may not have run yet
                    time.sleep(0.001)
                commands.close()
        while commands.wait(0.01):
            found += [event.ticket for event in commands.events()]
        self.assertEqual(found, [number for number in range(3000) if number % 7])
        asked = [command.number for command, _ in agent.replies]
        self.assertEqual(asked, [number for number in range(3000) if number % 7 == 0])
        statuses = [status for status, _ in itertools.groupby(status for _, status in agent.replies)]
        self.assertEqual(statuses, [Status.UNSUPPORTED, Status.CANCELLED])

    def test_a_worker_that_waits_is_woken_by_an_event(self) -> None:
        agent: Any = FakeAgent()
        commands = Commands(agent, self.fail, self.fail)
        self.addCleanup(commands.close)
        self.assertFalse(commands.wait(0.01))
        later = threading.Timer(0.1, agent.put, [SimpleNamespace(command=None, kind=EventKind.DONE, ticket=1)])
        later.start()
        begun = time.monotonic()
        self.assertTrue(commands.wait(PATIENCE))
        self.assertLess(time.monotonic() - begun, PATIENCE / 2)
        self.assertEqual([event.ticket for event in commands.events()], [1])

    def test_a_worker_goes_on_without_the_thread(self) -> None:
        def fail(name: str) -> Any:
            raise AttributeError(name)

        agent: Any = FakeAgent()
        commands = Commands(agent, fail, fail)
        self.addCleanup(commands.close)
        command = SimpleNamespace(verb=HAND_OVER, number=1, request=b"r")
        with self.assertLogs(LOGGER, logging.ERROR) as log:
            agent.put(SimpleNamespace(command=command, kind=EventKind.COMMAND, ticket=0))
            commands._thread.join(PATIENCE)
        self.assertIn("commands are refused from here on", "\n".join(log.output))
        agent.put(SimpleNamespace(command=command, kind=EventKind.COMMAND, ticket=0))
        agent.put(SimpleNamespace(command=None, kind=EventKind.DONE, ticket=1))
        self.assertTrue(commands.wait(PATIENCE))
        self.assertEqual([event.ticket for event in commands.events()], [1])
        self.assertEqual([status for _, status in agent.replies], [Status.CANCELLED])


if __name__ == "__main__":
    unittest.main()
