"""Files in which llama.cpp's server saves a slot, and from which it restores one.

The server writes one for `POST /slots/0?action=save` and reads one for `action=restore`, in the folder that
`--slot-save-path` names. A file has the tokens of a prompt and, but for the two numbers at its beginning, the
state of their sequence. Newer servers append checkpoints, states of fewer tokens, where they could not go back
to these without: of layers with a window, and of recurrent ones.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputOutputError, InvalidError, UnsupportedError
from kvferry.llamacpp.sections import MAGIC as STATE_MAGIC
from kvferry.llamacpp.sections import State, bytes_of

MAGIC = 0x67677371  # "ggsq"
#: Versions of files whose states are understood.
VERSIONS = (2, 3, 4)
#: Newer servers pack the tokens: this number, a version, how many tokens, the tokens, and how many media.
PACKET = -1
PACKET_VERSION = 1
#: What checkpoints begin with: a name and a version. How many follows; of each the number of tokens, two
#: positions, and three pieces with their lengths.
CHECKPOINTS = b"SCKP\1\0\0\0"
#: What a state begins with, but not that in a file.
BEGIN = np.array([STATE_MAGIC, 0], "<u4").view(np.uint8)


@dataclass(frozen=True)
class Slot:
    """What a file has.

    Attributes:
        tokens: ids of the prompt, as the server counts them
        state: of as many cells
        version: of the file
    """

    tokens: NDArray[np.int32]
    state: NDArray[np.uint8]
    version: int = VERSIONS[-1]


def read_slot(path: str | os.PathLike[str]) -> Slot:
    """Reads a file that the server has saved, without its checkpoints.

    Raises InvalidError, UnsupportedError (images), OSError.
    """
    content = np.fromfile(path, np.uint8)
    numbers = content[: len(content) // 4 * 4].view("<i4")
    if (
        len(numbers) < 3
        or numbers[0] != MAGIC
        or numbers[1] not in VERSIONS
        or not (0 <= numbers[2] <= len(numbers) - 3)
    ):
        raise InvalidError(
            f"{os.fspath(path)} begins with {numbers[:3].tolist()}; allowed: {MAGIC}, a version of "
            f"{VERSIONS[0]} to {VERSIONS[-1]}, and a number of tokens that follow"
        )
    count = int(numbers[2])
    state = np.concatenate([BEGIN, _without_checkpoints(content[12 + 4 * count :])])
    return Slot(_unpack(numbers[3 : 3 + count]), state, int(numbers[1]))


def write_slot(
    path: str | os.PathLike[str], tokens: Sequence[int], state: State, version: int = VERSIONS[-1]
) -> None:
    """Writes a file for the server to restore; nobody sees a part of it.

    Args:
        tokens: ids of the tokens whose cells the state has
        version: that of a file which the same server has saved

    Raises InvalidError (a version, or this is no state), OSError.
    """
    if version not in VERSIONS:
        raise InvalidError(f"version is {version}; allowed: {VERSIONS[0]} to {VERSIONS[-1]}")
    content = bytes_of(state)
    if content[:4].tobytes() != BEGIN[:4].tobytes():
        raise InvalidError(f"a state begins with {content[:4].tobytes()!r}; allowed: {BEGIN[:4].tobytes()!r}")
    ids = np.asarray(tokens, "<i4")
    target = pathlib.Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(np.array([MAGIC, version, len(ids)], "<i4").tobytes())
            file.write(ids.tobytes())
            file.write(content[len(BEGIN) :].data)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


class SlotServer:
    """A server of llama.cpp, which is asked to save and to restore slots. Safe to use from several threads.

    A slot that is restored must not be given to another request before the one that goes on with it: the server
    takes the request's `id_slot`, so whoever restores slots hands all of them out.

    Args:
        url: where it listens, such as "http://127.0.0.1:8080"
        folder: what it was given as --slot-save-path; mostly in memory, such as below /dev/shm. Files belong to
            this user alone, so the server must run as the same
        timeout: seconds for an answer; a slot under way is waited for
    """

    def __init__(self, url: str, folder: str | os.PathLike[str], timeout: float = 60) -> None:
        self._url, self._folder, self._timeout = url.rstrip("/"), pathlib.Path(folder), timeout

    def save(self, slot: int) -> Slot:
        """What a slot has computed.

        Raises InputOutputError (the server refuses, or does not answer), and what read_slot() raises.
        """
        path = self._file()
        try:
            self._ask(slot, "save", path.name)
            return read_slot(path)
        finally:
            path.unlink(missing_ok=True)

    def restore(self, slot: int, tokens: Sequence[int], state: State, version: int = VERSIONS[-1]) -> None:
        """Replaces what a slot has; a request with this `id_slot` whose prompt begins so computes the rest.

        Args:
            tokens, state, version: see write_slot()

        Raises InputOutputError (the server refuses, as for too many tokens, or does not answer), InvalidError.
        """
        path = self._file()
        try:
            write_slot(path, tokens, state, version)
            self._ask(slot, "restore", path.name)
        finally:
            path.unlink(missing_ok=True)

    def _file(self) -> pathlib.Path:
        return self._folder / f"kvferry-{uuid.uuid4().hex}.slot"

    def _ask(self, slot: int, action: str, name: str) -> None:
        request = urllib.request.Request(
            f"{self._url}/slots/{slot}?action={action}",
            json.dumps({"filename": name}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=self._timeout).close()
        except urllib.error.HTTPError as error:
            why = error.read(1000).decode(errors="replace")
            raise InputOutputError(f"the server does not {action} slot {slot}: {why}") from None
        except OSError as error:
            raise InputOutputError(f"the server at {self._url} does not answer: {error}") from None


def _without_checkpoints(content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What stands before the checkpoints of a file, which end where it ends."""
    whole = content.tobytes()
    begin = whole.find(CHECKPOINTS)
    while begin >= 0 and _end_of_checkpoints(whole, begin) != len(whole):
        begin = whole.find(CHECKPOINTS, begin + 1)
    return content if begin < 0 else content[:begin]


def _end_of_checkpoints(content: bytes, begin: int) -> int | None:
    """Where checkpoints end that begin at a place; None: none do."""
    at = begin + len(CHECKPOINTS) + 4
    try:
        (count,) = struct.unpack_from("<I", content, at - 4)
        for _ in range(count):
            at += 16
            for _ in range(3):
                (size,) = struct.unpack_from("<Q", content, at)
                at += 8 + size
    except struct.error:
        return None
    return at


def _unpack(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """The tokens of a prompt, which may be in a packet."""
    if not len(numbers) or numbers[0] != PACKET:
        return numbers
    if len(numbers) < 4 or numbers[1] != PACKET_VERSION or not 0 <= numbers[2] <= len(numbers) - 4:
        raise InvalidError(
            f"the tokens begin with {numbers[:3].tolist()}; allowed: {PACKET}, {PACKET_VERSION}, and "
            "a number of tokens"
        )
    count = int(numbers[2])
    if numbers[3 + count] != 0:
        raise UnsupportedError(f"the prompt has {numbers[3 + count]} images or sounds; allowed: none")
    return numbers[3 : 3 + count]
