"""Finding the UCX of Python packages, and reporting what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry import InvalidError, Transport, transport_kinds
from kvferry.ucx import ucx_libraries, with_ucx


def package(site: Path, name: str, *files: str) -> None:
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text("raise RuntimeError('it must not be imported')\n")
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("")


def test_the_ucx_of_packages_is_found_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = ucx_libraries()
    package(tmp_path, "libucx", "libucx/lib/libucp.so.0", "libucx/lib/libucs.so.0")
    package(
        tmp_path, "nixl_cu13", "nixl_cu13.libs/libucp-1a2b3c4d.so.0.0.0", "nixl_cu13.libs/libuct-1a2b.so.0.0.0"
    )
    found = [str(Path(file).relative_to(tmp_path)) for file in ucx_libraries() if file not in before]
    assert found == ["libucx/lib/libucp.so.0", "nixl_cu13.libs/libucp-1a2b3c4d.so.0.0.0"]
    files = ucx_libraries()
    assert with_ucx({"ucx.tls": "tcp"}) == {"ucx.tls": "tcp", "ucx.library": ":".join(["libucp.so.0", *files])}


def test_a_package_without_the_files_brings_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = ucx_libraries()
    package(tmp_path, "nixl")
    assert ucx_libraries() == before


def test_a_library_that_is_given_is_the_only_one() -> None:
    assert with_ucx({"ucx.library": "/some/libucp.so.0"}) == {"ucx.library": "/some/libucp.so.0"}


def test_a_transport_says_which_kinds_work_and_why_others_do_not() -> None:
    with Transport(settings={"ucx.library": "/no/such/libucp.so.0"}) as transport:
        findings = {found.kind: found for found in transport.findings}
    assert list(findings) == transport_kinds()
    assert findings["shm"].works and findings["shm"].why_not == ""
    if "ucx" in findings:
        assert findings["ucx"].asked and not findings["ucx"].works
        assert "/no/such/libucp.so.0: " in findings["ucx"].why_not
        with pytest.raises(InvalidError, match=r"ucx\.library"):
            Transport(settings={"ucx.library": ""})
