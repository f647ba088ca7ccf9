"""Finds the UCX of Python packages. The library loads it, see "ucx.library" in kvferry/transport.h."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from kvferry._values import mapping_of

SYSTEM = "libucp.so.0"
"""As the system's loader finds it."""

# Packages with a UCX of their own, and its place in or beside them. Wheels that contain libraries add a hash to
# the libraries' names.
PACKAGES = (
    ("libucx", "lib", "libucp.so.0"),
    ("nixl_cu13", "../nixl_cu13.libs", "libucp-*.so.0*"),
    ("nixl_cu12", "../nixl_cu12.libs", "libucp-*.so.0*"),
    ("nixl", "../nixl.libs", "libucp-*.so.0*"),
)


def _folders(package: str) -> list[Path]:
    """The folders where a package is installed; does not import it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def ucx_libraries() -> list[str]:
    """The libucp of each installed package that is known to have one: libucx-cu12, -cu13, NIXL's wheels."""
    return [
        str(file.resolve())
        for package, folder, pattern in PACKAGES
        for place in _folders(package)
        for file in sorted((place / folder).glob(pattern))
    ]


def with_ucx(settings: Mapping[str, str] | None) -> dict[str, str]:
    """The settings, with "ucx.library" added if it is missing: the system's UCX, then those of packages."""
    found = {} if settings is None else dict(mapping_of(settings))
    if "ucx.library" not in found:
        files = [file for file in ucx_libraries() if ":" not in file]
        if files:
            found["ucx.library"] = ":".join([SYSTEM, *files])
    return found
