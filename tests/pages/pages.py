#!/usr/bin/env python3
"""Compares pages of kvferry with the command's JSON and CSV: pages.py KVFERRY

Every cell of every decode rank must have, in the picture, the colour of the prefill rank that it is read from
by `plan --json`. Prints each case as CMocka does.
"""

import csv
import io
import itertools
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PLANS = {
    "slices of heads": [],
    "sizes that do not divide": ["--prefill", "tp=3", "--decode", "tp=2"],
    "more ranks than heads": ["--prefill", "tp=16", "--decode", "tp=4"],
    "uneven pipeline stages": ["--prefill", "pp-layers=20+12,tp=2", "--decode", "pp=3,tp=4"],
    "shares of the tokens": ["--model", "deepseek-v3", "--prefill", "tp=8,dcp=4", "--decode", "tp=2,block=64"],
    "states beside keys": ["--model", "jamba-1.5-mini", "--prefill", "tp=4,pp=2", "--decode", "tp=3"],
    "packed sources": ["--transport", "ucx/emulated"],
    "elements that are converted": ["--decode", "tp=2,dtype=f32"],
}
SWEEP = ["--prefill", "tp=2/4,order=nhd/hnd", "--decode", "tp=2,block=16/64,order=nhd/hnd"]


class Wrong(Exception):
    """A page shows something wrong."""


def run(kvferry, *arguments):
    """The output of the command."""
    return subprocess.run([kvferry, *arguments], check=True, capture_output=True, text=True, timeout=120).stdout


def read_page(text):
    """The root of a page; Wrong if it is not well-formed, or would load something from elsewhere."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise Wrong(f"not well-formed: {error}") from error
    for element in root.iter():
        if element.tag in {"script", "link", "img", "iframe", "object"} or {"src", "href"} & set(
            element.attrib
        ):
            raise Wrong(f"{element.tag} may take something from elsewhere")
    return root


def numbers(rect):
    """Left, top, right and bottom of a rectangle."""
    left, top, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
    return left, top, left + width, top + height


def cells_of(rank):
    """The cells of a rank's box: left, top, right and bottom in fractions of the box, and the colour."""
    rects = {
        kind: [rect for rect in rank.iter("rect") if rect.get("class") == kind] for kind in ("box", "cells")
    }
    left, top, right, bottom = numbers(rects["box"][0])
    cells = []
    for rect in rects["cells"]:
        begin, above, end, below = numbers(rect)
        width, height = right - left, bottom - top
        edges = (begin - left) / width, (above - top) / height, (end - left) / width, (below - top) / height
        cells.append((*edges, rect.get("fill")))
    return cells


def colour_at(cells, across, down):
    """The colour of a point of a rank's box; None if there is no cell."""
    for left, top, right, bottom, colour in cells:
        if left <= across < right and top <= down < bottom:
            return colour
    return None


def ranks_of(picture, side):
    """The boxes of a side, by rank."""
    return {int(g.get("data-rank")): g for g in picture.iter("g") if g.get("data-side") == side}


def colours_of(picture):
    """The prefill rank of each colour."""
    return {
        rect.get("fill"): rank
        for rank, box in ranks_of(picture, "prefill").items()
        for rect in box.iter("rect")
        if rect.get("class") == "cells"
    }


def cuts_of(plan, group, part):
    """Yields the decode rank, the source and the cut for each cut of a part."""
    for rank in plan["ranks"]:
        for source in rank["sources"]:
            for cut in source["cuts"]:
                if (cut["group"], cut["part"]) == (group, part):
                    yield rank["decode_rank"], source, cut


def expected_cells(plan, group, part):
    """The prefill rank of each cell, by decode rank, layer, unit and share; and the numbers of layers, units
    and shares."""
    cuts = list(cuts_of(plan, group, part))
    layers = sorted({layer for _, _, cut in cuts for layer in cut["layers"]})
    units = max(cut["units"][1] for _, _, cut in cuts)
    shares = max(cut.get("tokens", {}).get("count", 1) for _, _, cut in cuts)
    cells = {}
    for rank, source, cut in cuts:
        share = cut.get("tokens", {}).get("index")
        for layer in cut["layers"]:
            for unit in range(*cut["units"]):
                for index in range(shares) if share is None else [share]:
                    cells[rank, layers.index(layer), unit, index] = source["prefill_rank"]
    return cells, len(layers), units, shares


def check_cells(picture, plan, group, part):
    """Checks every cell of every decode rank, and every place without a cell."""
    cells, layers, units, shares = expected_cells(plan, group, part)
    colours = colours_of(picture)
    step = max(1, units // 128)  # a state has many channels: check some
    for rank, box in ranks_of(picture, "decode").items():
        shown = cells_of(box)
        for layer in range(layers):
            for unit in range(0, units, step):
                for share in range(shares):
                    across = (unit + (share + 0.5) / shares) / units
                    drawn = colours.get(colour_at(shown, across, (layer + 0.5) / layers))
                    wanted = cells.get((rank, layer, unit, share))
                    if drawn != wanted:
                        raise Wrong(
                            f"{group} {part}: decode rank {rank}, layer {layer}, unit {unit}, share {share} is "
                            f"drawn as read from {drawn}, and is read from {wanted}"
                        )


def check_flows(picture, plan, group, part):
    """Checks every line, and its way."""
    drawn = {
        (int(path.get("data-decode")), int(path.get("data-prefill")), path.get("class").split()[1])
        for path in picture.iter("path")
        if path.get("class").startswith("flow")
    }
    wanted = {(rank, source["prefill_rank"], source["way"]) for rank, source, _ in cuts_of(plan, group, part)}
    if drawn != wanted:
        raise Wrong(f"{group} {part}: lines are {sorted(drawn)}, sources are {sorted(wanted)}")


def check_times(root, plan):
    """Checks the bars: as long as the predicted times, all on one scale."""
    picture = next(svg for svg in root.iter("svg") if svg.get("class") == "times")
    drawn = [float(rect.get("width")) for rect in picture.iter("rect")]
    wanted = [source["predicted_ns"] for rank in plan["ranks"] for source in rank["sources"]]
    if len(drawn) != len(wanted):
        raise Wrong(f"{len(drawn)} bars for {len(wanted)} sources")
    scale = sum(drawn) / sum(wanted)
    for width, time in zip(drawn, wanted, strict=True):
        if abs(width - scale * time) > 1:
            raise Wrong(f"a bar of {width} for {time} ns, where {scale * time:.2f} is right")


def check_plan(page, plan):
    """Compares a whole page with the JSON of the same plan."""
    root = read_page(page)
    body = list(root.find("body"))
    seen = set()
    for heading, picture in itertools.pairwise(body):
        if picture.tag != "svg" or picture.get("class") != "cover":
            continue
        group, rest = heading.text.split(": ", 1)
        for part in rest.split(",")[0].split():
            check_cells(picture, plan, group, part)
            check_flows(picture, plan, group, part)
            seen.add((group, part))
    wanted = {
        (cut["group"], cut["part"])
        for rank in plan["ranks"]
        for source in rank["sources"]
        for cut in source["cuts"]
    }
    if seen != wanted:
        raise Wrong(f"pictures are of {sorted(seen)}, and the plan of {sorted(wanted)}")
    check_times(root, plan)


def check_map(page, table):
    """Compares a map with the CSV of the same sweep: the time of each pair; longer times are darker."""
    root = read_page(page)
    rows = list(csv.DictReader(io.StringIO(table)))
    cells = [cell for cell in root.iter("td")]
    if len(cells) != len(rows):
        raise Wrong(f"{len(cells)} cells for {len(rows)} pairs")
    lights = []
    for cell, row in zip(cells, rows, strict=True):
        if row["way"] == "refused":
            if cell.get("class") != "refused":
                raise Wrong(f"{row} was refused, and has a time in the map")
            continue
        number, unit = cell.text.split()
        shown = float(number) * {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[unit]
        if abs(shown / float(row["slowest_rank_ns"]) - 1) > 0.01:
            raise Wrong(f"{cell.text} is shown for {row}")
        lights.append((float(row["slowest_rank_ns"]), -int(cell.get("style").split("%")[1].split()[-1])))
    if [light for _, light in sorted(lights)] != sorted(light for _, light in lights):
        raise Wrong("a faster pair is darker than a slower one")


def make_pages(kvferry, folder):
    """Pages of all plans, and one map: a list of the name, the file, and the reference to compare it with."""
    pages = []
    for i, (name, arguments) in enumerate(PLANS.items()):
        file = Path(folder) / f"plan{i}.html"
        run(kvferry, "plan", *arguments, "--html", str(file))
        pages.append((name, file, json.loads(run(kvferry, "plan", *arguments, "--json"))))
    file = Path(folder) / "map.html"
    pages.append(("a map of shapes", file, run(kvferry, "sweep", *SWEEP, "--html", str(file))))
    return pages


class Cases:
    """Runs cases and counts those that failed."""

    def __init__(self):
        self.failed = self.passed = 0

    def case(self, name, check, *arguments, wrong=False):
        """One case: the check must find nothing; with `wrong` it must find something."""
        try:
            check(*arguments)
            fault = "nothing was noticed" if wrong else ""
        except Wrong as error:
            fault = "" if wrong else str(error)
        print(f"[  FAILED  ] {name}: {fault}" if fault else f"[       OK ] {name}")
        self.failed += bool(fault)
        self.passed += not fault

    def finish(self):
        """Prints the result, and returns the exit status."""
        print(f"[  FAILED  ] {self.failed} test(s)" if self.failed else f"[  PASSED  ] {self.passed} test(s)")
        return bool(self.failed)


def recoloured(page):
    """The page with one cell of a decode rank in the colour of another."""
    head, tail = page.split('data-side="decode"', 1)
    colours = [piece.split('"')[0] for piece in tail.split('fill="')[1:3]]
    return head + 'data-side="decode"' + tail.replace(colours[0], colours[1], 1)


def without_line(page):
    """The page without one of its lines."""
    begin = page.index('<path class="flow')
    return page[:begin] + page[page.index("</path>", begin) + len("</path>") :]


def main():
    """Runs all cases."""
    cases = Cases()
    with tempfile.TemporaryDirectory() as folder:
        pages = make_pages(sys.argv[1], folder)
        for name, file, reference in pages:
            check = check_map if isinstance(reference, str) else check_plan
            cases.case(name, check, file.read_text(), reference)
        page, plan = pages[0][1].read_text(), pages[0][2]
        cases.case("the page of another plan is noticed", check_plan, page, pages[1][2], wrong=True)
        cases.case("a cell in another colour is noticed", check_plan, recoloured(page), plan, wrong=True)
        cases.case("a line that is missing is noticed", check_plan, without_line(page), plan, wrong=True)
        cases.case(
            "markup that is not closed is noticed", check_plan, page.replace("</g>", "", 1), plan, wrong=True
        )
        cases.case(
            "a script is noticed",
            check_plan,
            page.replace("<h2>", "<script></script><h2>", 1),
            plan,
            wrong=True,
        )
    return cases.finish()


if __name__ == "__main__":
    sys.exit(main())
