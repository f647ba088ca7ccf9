"""The command: `python -m kvferry plan ...` runs the program that the wheel brings, or that the system has."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _is_program(path: Path) -> bool:
    """Not the script of the same name, which would come back here."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF" and os.access(path, os.X_OK)
    except OSError:
        return False


def main() -> int:
    """Becomes the command; 127 where there is none."""
    folders = [str(Path(__file__).with_name("bin")), *os.get_exec_path()]
    for folder in folders:
        program = Path(folder) / "kvferry"
        if _is_program(program):
            os.execv(program, ["kvferry", *sys.argv[1:]])
    print("kvferry: this package was built without the command, and there is none on the PATH", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main())
