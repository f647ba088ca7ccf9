"""The two requests of public proxies, with the keys in public_proxies.json.

`prefill` has the fields that a proxy adds to the client's for the prefill server. Its decode request has the
parameters of the answer, changed by `decode`; or only those in `only`, for proxies of connectors that meet in
other ways: such a request is computed, and the log says what is missing.
"""

from __future__ import annotations

import json
import logging
import pathlib
import unittest
from typing import Any

from halves import LAYERS, Half, a_request, blocks_of, steps

FILE = pathlib.Path(__file__).parent / "public_proxies.json"
TOKENS = 100
THERE, HERE = [3, 7, 5, 1], [9, 2, 4, 8, 6, 10, 11]  # blocks of 32 and of 16 tokens


class PublicProxies(unittest.TestCase):
    def test_their_two_requests(self) -> None:
        proxies = json.loads(FILE.read_text())
        self.assertGreaterEqual(sum(proxy["loads"] for proxy in proxies), 5)
        for i, proxy in enumerate(proxies):
            for mode in ("pull", "push"):
                with self.subTest(proxy["proxy"], mode=mode):
                    self.replay(f"r{i}", proxy, mode)

    def replay(self, name: str, proxy: dict[str, Any], mode: str) -> None:
        prefill, decode = Half("prefill", 32, transfer_mode=mode), Half("decode", 16)
        self.addCleanup(prefill.close)
        self.addCleanup(decode.close)
        for layer in range(LAYERS):
            prefill.write(layer, THERE, range(TOKENS))
        request = a_request(name, TOKENS, proxy["prefill"]["kv_transfer_params"])
        prefill.scheduling.add(request)
        self.assertEqual(prefill.scheduling.match(request, 0), (0, False))
        prefill.scheduling.allocated(request, blocks_of(THERE), 0)
        request.num_computed_tokens = TOKENS
        keep, answer = prefill.scheduling.finished(request, [THERE], True)
        self.assertTrue(keep and answer)
        assert answer is not None
        # The answer is serialized on its way.
        params = json.loads(json.dumps(proxy["only"] if "only" in proxy else {**answer, **proxy["decode"]}))
        if not proxy["loads"]:
            with self.assertLogs("vllm.kvferry", logging.ERROR) as log:
                self.assertEqual(decode.want(name, TOKENS, params, HERE), 0)
            self.assertIn(proxy["says"], "\n".join(log.output))
            return
        self.assertEqual(decode.want(name, TOKENS, params, HERE), TOKENS)
        steps(prefill, decode, until=lambda: name in decode.received and name in prefill.sent)
        self.assertEqual((decode.failed, decode.invalid), (set(), set()))
        for layer in range(LAYERS):
            self.assertEqual(decode.wrong(layer, HERE, range(TOKENS)), 0)
            self.assertGreater(decode.wrong(layer, HERE, range(TOKENS), salt=1), 0)
