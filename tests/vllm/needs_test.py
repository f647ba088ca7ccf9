"""The parts of vLLM that the connector uses: all of them exist, are listed, and are named if missing."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pathlib
import unittest
from types import SimpleNamespace
from typing import Any

from halves import Half, steps
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvferry.vllm
from kvferry.errors import UnsupportedError
from kvferry.vllm import compat, needs
from kvferry.vllm.connector import KvferryConnector

FOLDER = pathlib.Path(kvferry.vllm.__file__).parent


def imported_at_run_time(path: pathlib.Path) -> set[str]:
    """Modules that a file imports, except those that only annotations need."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


class Touches(unittest.TestCase):
    def test_this_vllm_has_all_that_is_needed(self) -> None:
        self.assertEqual(needs.missing(), [])

    def test_this_vllm_has_no_method_that_is_not_known(self) -> None:
        self.assertEqual(needs.unknown_hooks(compat.KVConnectorBase_V1), [])

    def test_what_is_missing_is_named_with_its_purpose(self) -> None:
        for need in (*needs.NEEDS, *needs.CPU_NEEDS):
            module, _, path = need.where.partition(":")
            for gone in (f"{module}:{path}_gone", f"{module}_gone:{path}"):
                name = gone.replace(":", ".").replace("(", r"\(")
                with self.subTest(gone), self.assertRaises(UnsupportedError) as caught:
                    needs.check([dataclasses.replace(need, where=gone)])
                self.assertIn(f"which has no {name} ({need.purpose})", str(caught.exception))

    def test_one_module_imports_vllm(self) -> None:
        for path in FOLDER.glob("*.py"):
            touched = {name for name in imported_at_run_time(path) if name.split(".")[0] == "vllm"}
            if path.name == "needs.py":
                touched -= {"vllm"}  # vLLM's version, for the message
            with self.subTest(path.name):
                self.assertEqual(bool(touched), path.name == "compat.py", touched)

    def test_what_is_imported_is_listed(self) -> None:
        listed = {need.where for need in (*needs.NEEDS, *needs.CPU_NEEDS)}
        tree = ast.parse((FOLDER / "compat.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm"):
                for name in node.names:
                    where = f"{node.module}:{name.name}"
                    with self.subTest(where):
                        self.assertTrue(any(f"{need}.".startswith(f"{where}.") for need in listed))

    def test_methods_take_what_vllm_gives_them(self) -> None:
        for name in (*needs.HOOKS, *needs.SLEEP):
            theirs = getattr(compat.KVConnectorBase_V1, name, None)
            if theirs is None:
                self.assertIn(name, needs.SLEEP)
                continue
            ours = getattr(KvferryConnector, name)
            with self.subTest(name):
                self.assertEqual(
                    list(inspect.signature(ours).parameters), list(inspect.signature(theirs).parameters)
                )


class Requests(unittest.TestCase):
    def test_a_shortened_prompt_is_short_everywhere(self) -> None:
        request = Request("r", list(range(10, 20)), SamplingParams(max_tokens=5), None)
        compat.shorten_prompt(request, 7)
        fresh = Request("s", list(range(10, 17)), SamplingParams(max_tokens=1), None)
        for name in ("num_prompt_tokens", "num_tokens", "max_tokens", "prompt_token_ids"):
            with self.subTest(name):
                self.assertEqual(getattr(request, name), getattr(fresh, name))
        self.assertEqual(list(request.all_token_ids), list(fresh.all_token_ids))


class Sleep(unittest.TestCase):
    def test_an_engine_may_sleep_where_vllm_says_when_memory_goes(self) -> None:
        told = hasattr(compat.KVConnectorBase_V1, "unregister_kv_caches")
        self.assertEqual(KvferryConnector.supports_sleep_mode(None), told)
        transfer = KVTransferConfig(
            kv_connector="KvferryConnector", kv_connector_module_path="kvferry.vllm", kv_role="kv_producer"
        )
        config: Any = SimpleNamespace(
            kv_transfer_config=transfer, model_config=SimpleNamespace(enable_sleep_mode=True)
        )
        if told:
            VllmConfig._verify_kv_transfer_compat(config)
        else:
            with self.assertRaisesRegex(UnsupportedError, "enable_sleep_mode"):
                KvferryConnector(config, compat.KVConnectorRole.SCHEDULER, None)


class Outputs(unittest.TestCase):
    def test_reports_of_workers_before_one_failed_are_not_lost(self) -> None:
        """vLLM keeps the reports of live workers in a step that failed, and passes them on with the next
        step."""
        if not hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"):
            self.skipTest("this vLLM loses them with the step")
        prefill, decode = Half("prefill", 32), Half("decode", 16)
        self.addCleanup(prefill.close)
        self.addCleanup(decode.close)
        params = prefill.serve("r", 100, [3, 7, 5, 1])
        self.assertEqual(decode.want("r", 100, params, [9, 2, 4, 8, 6, 10, 11]), 100)
        late = KVOutputAggregator(expected_finished_count=1)
        reported: list[str] = []

        def note(output: Any) -> None:
            if output.finished_recving:
                late.ft_defer_kv_connector_outputs(
                    [KVConnectorOutput(finished_recving=output.finished_recving)]
                )
                reported.extend(output.finished_recving)
                output = KVConnectorOutput()
            update(output)

        update, decode.scheduling.update = decode.scheduling.update, note  # type: ignore[method-assign]
        steps(prefill, decode, until=lambda: bool(reported))
        self.assertIn("r", decode.scheduling._loading)
        step = SimpleNamespace(kv_connector_output=KVConnectorOutput())
        update(late.aggregate([step]).kv_connector_output)  # type: ignore[list-item]
        self.assertNotIn("r", decode.scheduling._loading)


if __name__ == "__main__":
    unittest.main()
