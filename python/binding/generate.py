"""Writes the C source of the extension module `kvferry._binding` from the public headers.

    python generate.py INCLUDE_FOLDER EXTRA_SOURCE... OUTPUT

cffi reads declarations, not headers. This program takes the declarations out of the headers, so that no
prototype, struct or constant is written twice. It reads every header of the folder and its subfolders, each
after the headers that it includes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cffi

INCLUDE = re.compile(r"^#include <(kvferry/[\w/]+\.h)>", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
CONTINUED = re.compile(r"\\\n")
CONSTANT = re.compile(r"^#define\s+(KVF_\w+)\s+(\S.*)$", re.MULTILINE)
# A struct member or a type that is a pointer to a function: a callback.
CALLBACK = re.compile(r"(?:typedef\s+)?(\w[\w\s]*?\**)\s*\(\*(\w+)\)\s*\(([^()]*)\)\s*;")
# A function of the extra sources.
FUNCTION = re.compile(r"^static (\w[\w *]*\bpython_\w+\([^()]*\)) \{$", re.MULTILINE)
# Callbacks that must not run in an interpreter: the library may hold locks when it calls an allocator.
NOT_FROM_PYTHON = ("allocate", "resize", "release")
NOT_NUMBERS = ("KVF_API",)


def in_include_order(include: Path) -> list[Path]:
    """The headers of the library, each after the headers that it includes."""
    ordered: list[Path] = []

    def visit(header: Path) -> None:
        if header in ordered:
            return
        for name in INCLUDE.findall(header.read_text()):
            visit(include / name)
        ordered.append(header)

    for header in sorted((include / "kvferry").rglob("*.h")):
        visit(header)
    return ordered


def declarations(text: str) -> str:
    """The parts of one header that cffi can read: declarations, and integer constants as `#define NAME ...`."""
    text = COMMENT.sub(" ", CONTINUED.sub(" ", text))
    constants = []
    for name, value in CONSTANT.findall(text):
        if name in NOT_NUMBERS or value.startswith('"'):
            continue
        # cffi needs a plain number for the length of an array; the compiler computes the other constants.
        number = re.fullmatch(r"(\d+)[uUlL]*", value.strip())
        constants.append(f"#define {name} {number.group(1) if number else '...'}")
    # `extern "C" {` and its closing brace stand between #ifdef __cplusplus and #endif.
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\bKVF_API\b", "", text)
    text = re.sub(r"__attribute__\s*\(\(.*?\)\)", "", text)
    text = re.sub(r"\n\s*\n+", "\n", text)
    return "\n".join(constants) + "\n" + text.strip() + "\n"


def callbacks(text: str) -> str:
    """For each callback of the library, a function `python_<name>` that Python code can implement."""
    found = {}
    for result, name, parameters in CALLBACK.findall(text):
        if name not in NOT_FROM_PYTHON:
            found[name] = f'extern "Python" {result.split("typedef")[-1].strip()} python_{name}({parameters});'
    return "\n".join(found.values()) + "\n"


def main() -> None:
    include, *extras, output = (Path(argument) for argument in sys.argv[1:])
    headers = in_include_order(include)
    text = "\n".join(declarations(header.read_text()) for header in headers)
    # The extra sources have no header: their declarations are taken from `static ... python_NAME(...) {`.
    extra_text = "".join(extra.read_text() for extra in extras)
    own = FUNCTION.findall(COMMENT.sub(" ", extra_text))

    ffi = cffi.FFI()
    ffi.cdef(text)
    ffi.cdef(callbacks(text))
    ffi.cdef("".join(f"{prototype};\n" for prototype in own))
    includes = "".join(f"#include <{header.relative_to(include)}>\n" for header in headers)
    ffi.set_source("kvferry._binding", includes + extra_text)
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    main()
