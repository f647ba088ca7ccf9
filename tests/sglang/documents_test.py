"""The lines of docs/sglang.md that start servers, read by SGLang's own parser."""

from __future__ import annotations

import argparse
import pathlib
import re
import shlex
import unittest

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "sglang.md"
START = "python -m sglang.launch_server "


class Documents(unittest.TestCase):
    """See above."""

    def test_sglang_understands_the_lines_that_start_servers(self) -> None:
        load_plugins()  # as the command does before it reads its arguments
        parser = argparse.ArgumentParser(exit_on_error=False)
        ServerArgs.add_cli_args(parser)
        text = DOCUMENT.read_text().replace("\\\n", " ")
        lines = re.findall(rf"^{re.escape(START)}(.*)$", text, re.MULTILINE)
        found = [parser.parse_args(shlex.split(line)) for line in lines]
        self.assertEqual([args.disaggregation_mode for args in found], ["prefill", "decode"])
        self.assertEqual({args.disaggregation_transfer_backend for args in found}, {"kvferry"})


if __name__ == "__main__":
    unittest.main()
