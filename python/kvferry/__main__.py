"""The command: `python -m kvferry plan ...` runs the program in the wheel, or else the system's."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _is_program(path: Path) -> bool:
    """Whether this is the program, not the script of the same name, which would call this module again."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF" and os.access(path, os.X_OK)
    except OSError:
        return False


def main() -> int:
    """Replaces this process by the command; returns 127 if there is none."""
    folders = [str(Path(__file__).with_name("bin")), *os.get_exec_path()]
    for folder in folders:
        program = Path(folder) / "kvferry"
        if _is_program(program):
            os.execv(program, ["kvferry", *sys.argv[1:]])
    print("kvferry: this package was built without the command, and there is none on the PATH", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main())
