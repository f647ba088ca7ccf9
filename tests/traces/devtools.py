"""Speaks with a browser over its debugging pipe: DevTools messages, each ended by a zero byte."""

import contextlib
import fcntl
import json
import os
import select
import subprocess
import time

from pages import Wrong

SECONDS = 120  # for one answer


def _above_nine(number):
    """The same open file under a number that a shell's redirections to 3 and 4 do not close."""
    above = fcntl.fcntl(number, fcntl.F_DUPFD, 10)
    os.close(number)
    return above


class Browser:
    """One page of a browser that reaches nothing but this machine's loopback.

    Attributes:
        complaints: what the page said as errors, and exceptions that nobody caught
    """

    def __init__(self, program, folder):
        theirs, ours = (_above_nine(number) for number in os.pipe())
        self._out = ours
        self._in, answers = (_above_nine(number) for number in os.pipe())
        command = [
            program,
            "--no-sandbox",  # it may run as root, as in a container
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={folder}/profile",
            "--window-size=1600,1200",
            "--remote-debugging-pipe",
        ]
        moved = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "bash", *command]
        with open(f"{folder}/browser.log", "wb") as log:
            self._process = subprocess.Popen(moved, pass_fds=(theirs, answers), stdout=log, stderr=log)
        os.close(theirs)
        os.close(answers)
        self._rest = b""
        self._number = 0
        self._session = None
        self.complaints = []
        page = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Runtime", "Page"):
            self._call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Ends the browser, and waits until its own processes have ended, too: they write to the folder."""
        self._session = None
        with contextlib.suppress(Wrong, OSError):
            self._call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _message(self, until):
        """The next message; Wrong where none comes."""
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0, until - time.monotonic()))[0]:
                raise Wrong("the browser does not answer")
            read = os.read(self._in, 1 << 16)
            if not read:
                raise Wrong("the browser has ended")
            self._rest += read
        first, self._rest = self._rest.split(b"\0", 1)
        return json.loads(first)

    def _note(self, event):
        """Keeps what the page complains of."""
        said = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(said["exceptionDetails"].get("text", "an exception"))
        elif event.get("method") == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
            self.complaints.append(" ".join(str(part.get("value", "")) for part in said["args"]))

    def _call(self, method, **parameters):
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while (message := self._message(until)).get("id") != self._number:
            self._note(message)
        if "error" in message:
            raise Wrong(f"{method}: {message['error']['message']}")
        return message["result"]

    def open(self, address):
        """Opens an address."""
        self._call("Page.navigate", url=address)

    def evaluate(self, expression):
        """The value of an expression of JavaScript, waited for where it is a promise; Wrong where it throws."""
        found = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            thrown = found["exceptionDetails"]
            raise Wrong(thrown.get("exception", {}).get("description", thrown["text"])[:500])
        return found["result"].get("value")

    def until(self, condition):
        """Waits until an expression is true."""
        begun = time.monotonic()
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > begun + SECONDS:
                raise Wrong(f"it does not come: {condition}")
            time.sleep(0.1)
