"""The lines of docs/vllm.md that start servers and the proxy, read by vLLM's own parser and by the proxy's."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import unittest
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvferry.vllm import KvferryConnector, proxy

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "vllm.md"


def commands() -> dict[str, list[list[str]]]:
    """The commands of the document's first block, by their first word; variables stay before it."""
    block = re.search(r"^```sh\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    found: dict[str, list[list[str]]] = {}
    for paragraph in block[1].split("\n\n"):
        words = shlex.split(paragraph, comments=True)
        first = next(word for word in words if not re.match(r"[A-Z_]+=", word))
        found.setdefault(first, []).append(words)
    return found


def engine_parser() -> FlexibleArgumentParser:
    """The parser of the command `vllm`, with its subcommand `serve`."""
    parser = FlexibleArgumentParser()
    inside = parser.add_subparsers(dest="subparser")
    for command in cmd_init():
        command.subparser_init(inside)
    return parser


class Lines(unittest.TestCase):
    def served(self) -> dict[str, int]:
        """The role of each server and its port, as vLLM reads the lines."""
        parser = engine_parser()
        ports = {}
        for variable, program, *words in commands()["vllm"]:
            self.assertRegex(variable, r"^KVFERRY_SIDE_CHANNEL_PORT=\d+$")
            given = parser.parse_args(words)
            self.assertEqual((program, given.subparser, given.model_tag), ("vllm", "serve", "MODEL"))
            connector = KVConnectorFactory.get_connector_class(given.kv_transfer_config)
            self.assertIs(connector, KvferryConnector)
            self.assertEqual(given.kv_transfer_config.kv_load_failure_policy, "recompute")
            ports[given.kv_transfer_config.kv_role] = given.port
        return ports

    def test_the_servers_and_the_proxy_are_asked_where_they_listen(self) -> None:
        ports = self.served()
        self.assertEqual(set(ports), {"kv_producer", "kv_consumer"})
        self.assertEqual(len({words[0] for words in commands()["vllm"]}), 2, "side channels share a port")
        ((_, _, module, *words),) = commands()["python"]
        self.assertEqual(module, proxy.__name__)
        listens = mock.patch.object(proxy, "_listen")
        with mock.patch.object(proxy.web, "run_app"), mock.patch.object(proxy, "Proxy") as made, listens as at:
            proxy.main(words)
        prefill, decode = made.call_args.args
        self.assertEqual(prefill, [f"http://127.0.0.1:{ports['kv_producer']}"])
        self.assertEqual(decode, [f"http://127.0.0.1:{ports['kv_consumer']}"])
        ((_, url, *options),) = commands()["curl"]
        self.assertEqual(url, f"http://127.0.0.1:{at.call_args.args[1]}/v1/completions")
        asked = json.loads(options[options.index("-d") + 1])
        self.assertEqual(asked["model"], "MODEL")

    def test_a_wrong_line_is_refused(self) -> None:
        parser = engine_parser()
        (words, _) = commands()["vllm"]
        with self.assertRaises(SystemExit), mock.patch("sys.stderr"):
            parser.parse_args([*words[2:], "--kv-transfer-configuration", "{}"])


if __name__ == "__main__":
    unittest.main()
