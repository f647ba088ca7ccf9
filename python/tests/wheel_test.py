"""The wheel works where there is no compiler. KVF_WHEEL names it; scripts/check-python builds one."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

SMOKE = """
import sys
from coordinates import DECODE_TABLE, PREFILL_TABLE, TOKENS, decode_engine, fill, prefill_engine, small_model
from coordinates import wrong_cells
from kvferry import Agent, EventKind, GroupSteps, transport_kinds

model = small_model()
prefill, decode = prefill_engine(model, tp_size=1), decode_engine(model)
with Agent(prefill) as producer, Agent(decode, verify=True) as consumer:
    theirs, ours = producer.allocate_regions(), consumer.allocate_regions()
    fill(prefill.shard(0), theirs, PREFILL_TABLE)
    producer.register(theirs)
    consumer.register(ours)
    producer.hold("r", [GroupSteps(PREFILL_TABLE, 0, TOKENS)])
    consumer.pull("r", producer.contact, [GroupSteps(DECODE_TABLE, 0, TOKENS)])
    event = consumer.wait_event(30)
    assert event and event.kind is EventKind.DONE, event
    assert wrong_cells(decode.shard(0), ours, DECODE_TABLE) == []
assert transport_kinds() == ["inproc", "shm", "messages"]
for line in open("/proc/self/maps"):
    for name in ("libzmq", "libsodium", "libjson-c", "libxxhash", "libkvferry"):
        assert name not in line or sys.prefix in line, line
print("works")
"""


@pytest.mark.skipif("KVF_WHEEL" not in os.environ, reason="KVF_WHEEL names no wheel")
def test_the_wheel_works_without_a_compiler(tmp_path: Path) -> None:
    wheel = Path(os.environ["KVF_WHEEL"])
    assert "-abi3-manylinux" in wheel.name
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    ours = ("PYTHON", "VIRTUAL_ENV", "LD_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["PATH"] = str(python.parent)
    for tool in ("cc", "gcc", "clang", "cmake", "make", "ninja"):
        assert not (python.parent / tool).exists()
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    subprocess.run([str(python), *quiet, str(wheel)], env=environment, check=True, cwd=tmp_path)
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    ran = subprocess.run(
        [str(python), "-c", SMOKE], env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert ran.stdout == "works\n", ran.stderr
