"""The processors on which the threads of a worker's agent run."""

from __future__ import annotations

import os
import pathlib
import unittest
from unittest import mock

from halves import Half, register_alone

from kvferry.vllm.worker import Worker

THREADS = pathlib.Path("/proc/self/task")


class Processors(unittest.TestCase):
    def setUp(self) -> None:
        self.all = os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)
        self.one = {min(os.sched_getaffinity(0))}
        self.half = Half("prefill", 32)
        self.addCleanup(self.half.close)

    def of_new_threads(self, environment: dict[str, str]) -> list[set[int]]:
        """Registers caches on a thread that is bound to one processor: where the agent's threads may run."""
        before, own = set(THREADS.iterdir()), os.sched_getaffinity(0)
        worker = Worker(self.half.config, self.half.cache)
        os.sched_setaffinity(0, self.one)
        try:
            with mock.patch.dict(os.environ, environment):
                register_alone(worker, self.half.layers)
            self.assertEqual(os.sched_getaffinity(0), self.one, "the caller's own")
            new = [os.sched_getaffinity(int(path.name)) for path in set(THREADS.iterdir()) - before]
        finally:
            os.sched_setaffinity(0, own)
            worker.close()
        self.assertTrue(new)
        return new

    def test_threads_do_not_share_the_core_that_openmp_gave_to_the_main_thread(self) -> None:
        if self.all == self.one:
            self.skipTest("there is only one processor")
        for bound in self.of_new_threads({"GOMP_CPU_AFFINITY": "0"}):
            self.assertEqual(bound, self.all)

    def test_without_openmps_binding_they_run_where_the_worker_runs(self) -> None:
        for bound in self.of_new_threads({}):
            self.assertEqual(bound, self.one)


if __name__ == "__main__":
    unittest.main()
