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
from kvferry.ucx import ucx_libraries

package = sys.argv[1] == "package"
how = {"transport": "messages"} if sys.argv[1] == "network" else {}
if package:
    how = {"transport": "ucx", "settings": {"ucx.library": ucx_libraries()[0], "ucx.tls": "tcp,self"}}
model = small_model()
prefill, decode = prefill_engine(model, tp_size=1), decode_engine(model)
with Agent(prefill, **how) as producer, Agent(decode, verify=True, **how) as consumer:
    theirs, ours = producer.allocate_regions(), consumer.allocate_regions()
    fill(prefill.shard(0), theirs, PREFILL_TABLE)
    producer.register(theirs)
    consumer.register(ours)
    producer.hold("r", [GroupSteps(PREFILL_TABLE, 0, TOKENS)])
    consumer.pull("r", producer.contact, [GroupSteps(DECODE_TABLE, 0, TOKENS)])
    event = consumer.wait_event(30)
    assert event and event.kind is EventKind.DONE, event
    assert wrong_cells(decode.shard(0), ours, DECODE_TABLE) == []
for name in ("libucp", "libfabric"):
    assert sys.argv[1] != "network" or name not in open("/proc/self/maps").read()
assert transport_kinds() == ["inproc", "cuda", "shm", "libfabric", "ucx", "messages"]
needed = ["libzmq", "libsodium", "libjson-c", "libxxhash", "libkvferry"]
if package:
    needed += ["libucp", "libucs"]
maps = open("/proc/self/maps").read().splitlines()
for name in needed:
    assert all(sys.prefix in line for line in maps if name in line), maps
assert not package or any("/libucx/lib/libucp" in line for line in maps), maps
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

    def run(*arguments: str) -> str:
        ran = subprocess.run(
            [str(python), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=600,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    run(*quiet, str(wheel))
    for command in (["-m", "kvferry"], [str(python.parent / "kvferry")]):  # the wheel contains the command
        assert run(*command, "--version").startswith("kvferry ")
        assert "llama-3.1-8b" in run(*command, "models")
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    environment["UCX_NET_DEVICES"] = "lo"
    assert run("-c", SMOKE, "machine") == "works\n"
    assert run("-c", SMOKE, "network") == "works\n"
    if "KVF_CUDA_LIBRARY" in os.environ:  # the wheel contains device code
        library = Path(os.environ["KVF_CUDA_LIBRARY"])
        environment["LD_LIBRARY_PATH"] = str(library.parent)
        codes = "from kvferry import devices; print(*{device.code for device in devices()})"
        assert run("-c", codes).split() != []
        del environment["LD_LIBRARY_PATH"]
    run(*quiet, f"{wheel}[ucx]")
    assert run("-c", SMOKE, "package") == "works\n"
