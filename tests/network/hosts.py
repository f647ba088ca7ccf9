"""Hosts as network namespaces, and the links between them: a switch of veth pairs, or a wire (wires.py).

The names of everything made here contain this process's id; closing the Network removes all of it.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from wires import DEVICE, End, NetemWire, OwnWire, Wire

PREFIX = f"kvf{os.getpid()}"
OFFLOAD = Path(__file__).with_name("offload.py")


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=20)
    assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.stderr.strip()}"
    return done


def works(*arguments: str) -> bool:
    return run(*arguments, check=False).returncode == 0


def missing() -> str | None:
    """What this machine lacks for namespaces with links, as text; None: nothing."""
    if os.geteuid() != 0:
        return "not root"
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"there is no {tool} (Debian: iproute2)"
    name = f"{PREFIX}probe"
    if not works("ip", "netns", "add", name):
        return "network namespaces cannot be made here"
    try:
        if not works(
            "ip", "link", "add", "v0", "netns", name, "type", "veth", "peer", "name", "v1", "netns", name
        ):
            return "this kernel has no veth"
        if not works("ip", "netns", "exec", name, "ip", "link", "add", "b0", "type", "bridge"):
            return "this kernel has no bridge"
        if not works("ip", "netns", "exec", name, "ip", "tuntap", "add", "t0", "mode", "tun"):
            return "this kernel has no TUN devices"
    finally:
        run("ip", "netns", "del", name, check=False)
    return None


def without_netem() -> str | None:
    """Why netem cannot shape links here, in the words of tc; None: it can."""
    name = f"{PREFIX}netem"
    run("ip", "netns", "add", name)
    try:
        done = run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms", check=False)
    finally:
        run("ip", "netns", "del", name, check=False)
    return None if done.returncode == 0 else " ".join(done.stderr.split())


class Lacking(Exception):
    """This machine cannot do what a case needs."""


class Process:
    """A program; a thread reads its lines as they come."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            env=os.environ | environment,
        )
        self.lines: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put((time.monotonic(), line.rstrip("\n")))

    def say(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def line(self, seconds: float) -> str:
        """The next line; AssertionError if none comes in time."""
        try:
            return self.lines.get(timeout=seconds)[1]
        except queue.Empty:
            raise AssertionError(f"no word within {seconds} s from {self.process.args}") from None

    def line_with(self, words: str, seconds: float) -> str:
        end = time.monotonic() + seconds
        seen = []
        while (left := end - time.monotonic()) > 0:
            try:
                line = self.lines.get(timeout=left)[1]
            except queue.Empty:
                break
            if words in line:
                return line
            seen.append(line)
        raise AssertionError(f"nothing with '{words}' within {seconds} s: {seen}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Asks the program to end, and kills it if it does not."""
        if self.process.stdin:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


class Host:
    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.space = f"{PREFIX}{name}"
        self.address = ""
        run("ip", "netns", "add", self.space)
        self.ip("link", "set", "lo", "up")

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.space, *arguments]

    def ip(self, *arguments: str) -> None:
        run("ip", "-n", self.space, *arguments)

    def tc(self, *arguments: str) -> str:
        return run("tc", "-n", self.space, *arguments).stdout

    def came_out_of_order(self) -> int:
        """Packets of TCP that arrived here before others that were sent earlier, or are missing."""
        lines = run(*self.command("cat", "/proc/net/netstat")).stdout.splitlines()
        names, numbers = (line.split() for line in lines if line.startswith("TcpExt:"))
        return int(numbers[names.index("TCPOFOQueue")])

    def remember_no_rate(self) -> None:
        """TCP, if it is BBR, otherwise sends at a slow link's rate for seconds after the link became fast."""
        run(*self.command("sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"))

    def lose(self, percent: float) -> None:
        """Drops incoming packets at random, by nftables."""
        if not shutil.which("nft"):
            raise Lacking("there is no nft (Debian: nftables)")
        for line in (
            "add table ip loss",
            "add chain ip loss input { type filter hook input priority 0; }",
            f"add rule ip loss input numgen random mod 100000 lt {round(percent * 1000)} drop",
        ):
            if not works(*self.command("nft", line)):
                raise Lacking("this kernel's nftables has no numgen")

    def read(self, *files: str) -> list[list[str]]:
        """The words of each line of the host's own files."""
        return [line.split() for line in run(*self.command("cat", *files)).stdout.splitlines()]

    def devices(self) -> list[list[str]]:
        """What "ip -details link" says of each device, as words."""
        shown = run("ip", "-n", self.space, "-details", "-oneline", "link").stdout
        return [line.split() for line in shown.splitlines()]

    def listens(self) -> set[int]:
        """The TCP ports that it listens on."""
        lines = self.read("/proc/net/tcp", "/proc/net/tcp6")
        return {int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A"}

    def bad_checksums(self) -> int:
        """TCP segments that it has dropped because their checksum was wrong."""
        names, values = (words for words in self.read("/proc/net/snmp") if words[0] == "Tcp:")
        return int(values[names.index("InCsumErrors")])

    def start(self, *arguments: str, **environment: str) -> Process:
        process = Process(self.command(*arguments), environment)
        self.network.processes.append(process)
        return process

    def run(self, *arguments: str, seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=seconds,
            env=os.environ | environment,
        )


class Network:
    """Some hosts.

    Args:
        netem: whether netem shapes wires; otherwise wire.c does
    """

    def __init__(self, netem: bool = False) -> None:
        self.netem = netem
        self.processes: list[Process] = []
        self.hosts: list[Host] = []
        self.switches: list[Host] = []

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in reversed(self.processes):
            process.end()
        for host in self.hosts + self.switches:
            run("ip", "netns", "del", host.space, check=False)

    def host(self, name: str) -> Host:
        host = Host(self, name)
        self.hosts.append(host)
        return host

    def switch(
        self, names: str, mbits: int = 0, mtu: int = 1500, device: str = "eth0", ipv6: bool = False
    ) -> list[Host]:
        """Connects hosts to one network; existing hosts get another device on it."""
        number = len(self.switches)
        bridge = Host(self, f"switch{number}")
        self.switches.append(bridge)
        bridge.ip("link", "add", "bridge0", "type", "bridge")
        bridge.ip("link", "set", "bridge0", "mtu", str(mtu), "up")
        known = {host.name: host for host in self.hosts}
        hosts = [known.get(name) or self.host(name) for name in names]
        for i, host in enumerate(hosts):
            port = f"to{host.name}"
            run("ip", "link", "add", device, "netns", host.space, "type", "veth",
                "peer", "name", port, "netns", bridge.space)  # fmt: skip
            bridge.ip("link", "set", port, "mtu", str(mtu), "master", "bridge0", "up")
            host.ip("link", "set", device, "mtu", str(mtu), "up")
            if ipv6:
                address = f"fd0{number}::{i + 1}"
                host.ip("addr", "add", f"{address}/64", "dev", device, "nodad")
                address = f"[{address}]"
            else:
                address = f"10.77.{number}.{i + 1}"
                host.ip("addr", "add", f"{address}/24", "dev", device)
            host.address = host.address or address
            if mbits:
                host.tc("qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbits}mbit",
                        "burst", "512kb", "latency", "20ms")  # fmt: skip
        return hosts

    def without_offload(self) -> None:
        """Checksums are computed and checked by the kernel, on all hosts and switches."""
        for host in self.hosts + self.switches:
            devices = [words[1].partition("@")[0].rstrip(":") for words in host.devices() if "veth" in words]
            run(*host.command(sys.executable, str(OFFLOAD), *devices))

    def wire(self, program: str, mtu: int = 1500) -> tuple[Host, Host, Wire]:
        """Connects two new hosts by a link that can be shaped.

        Args:
            program: wire.c's
        """
        a, b = self.host("a"), self.host("b")
        wire = self._veth(a, b, mtu) if self.netem else self._tun(program, a, b, mtu)
        for host, own in ((a, 1), (b, 2)):
            host.ip("addr", "add", f"10.78.0.{own}/24", "dev", DEVICE)
            host.address = f"10.78.0.{own}"
        return a, b, wire

    def _tun(self, program: str, a: Host, b: Host, mtu: int) -> Wire:
        process = Process([program, a.space, b.space, str(mtu)], {})
        self.processes.append(process)
        process.line_with("ready", 5)

        def ask(command: str) -> str:
            process.say(command)
            return process.line(5)

        return OwnWire(ask)

    @staticmethod
    def _veth(a: Host, b: Host, mtu: int) -> Wire:
        run("ip", "link", "add", DEVICE, "netns", a.space, "type", "veth", "peer", "name", DEVICE,
            "netns", b.space)  # fmt: skip
        for host, own, other in ((a, 1, 2), (b, 2, 1)):
            host.ip("link", "set", DEVICE, "address", f"02:00:00:00:00:0{own}", "mtu", str(mtu), "up")
            # A host that is out of reach stays known, as it is behind a router.
            host.ip("neigh", "add", f"10.78.0.{other}", "lladdr", f"02:00:00:00:00:0{other}", "dev", DEVICE,
                    "nud", "permanent")  # fmt: skip
        return NetemWire((End(a.tc, a.ip), End(b.tc, b.ip)), mtu)
