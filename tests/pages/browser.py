#!/usr/bin/env python3
"""Checks pages of kvferry in a real browser: browser.py KVFERRY BROWSER

The browser draws each page into an image without a network. Every rank's colour must cover as much of the image
as its cells and bars do in the page. The browser must find the elements that a parser of XML finds, and must
not complain.
"""

import collections
import colorsys
import re
import struct
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zlib
from html.parser import HTMLParser
from pathlib import Path

from pages import Cases, Wrong, make_pages

WIDTH, HEIGHT = 1100, 2600


def browse(browser, folder, *arguments):
    """What the browser prints; Wrong if it fails or complains."""
    command = [
        browser,
        "--no-sandbox",  # for tests that run as root, as in a container
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
        "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder}/profile",
        f"--window-size={WIDTH},{HEIGHT}",
        *arguments,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if ended.returncode:
        raise Wrong(f"the browser ended with {ended.returncode}: {ended.stderr[-500:]}")
    complaints = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    if complaints:
        raise Wrong(f"the browser complains: {complaints[0]}")
    return ended.stdout


class Elements(HTMLParser):
    """Counts elements by their name."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def handle_starttag(self, tag, attrs):
        self.count[tag] += 1


def check_elements(root, dom):
    """Compares the browser's elements with the parser's: an element that is not closed changes the
    browser's."""
    elements = Elements()
    elements.feed(dom)
    wanted = collections.Counter(element.tag for element in root.iter())
    elements.count.pop("tbody", None)  # the browser adds it to tables
    if elements.count != wanted:
        raise Wrong(f"elements are {elements.count - wanted} too many, {wanted - elements.count} too few")


def unfilter(kind, line, before, step):
    """Undoes the filter of one line of a PNG, in place."""
    if kind == 1:
        for i in range(step, len(line)):
            line[i] = (line[i] + line[i - step]) & 255
    elif kind == 2:
        for i, above in enumerate(before):
            line[i] = (line[i] + above) & 255
    elif kind == 3:
        for i, above in enumerate(before):
            left = line[i - step] if i >= step else 0
            line[i] = (line[i] + (left + above) // 2) & 255
    elif kind == 4:
        for i, above in enumerate(before):
            left, corner = (line[i - step], before[i - step]) if i >= step else (0, 0)
            guess = left + above - corner
            far = (abs(guess - left), abs(guess - above), abs(guess - corner))
            line[i] = (line[i] + (left, above, corner)[far.index(min(far))]) & 255


def pixels_of(file):
    """How many pixels an image has of each colour."""
    data, at, packed = file.read_bytes(), 8, b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, depth, colours = struct.unpack(">IIBB", body[:10])
        packed += body if kind == b"IDAT" else b""
        at += size + 12
    if depth != 8 or colours not in (2, 6):
        raise Wrong(f"an image of {depth} bits and kind {colours} is not read here")
    step = 3 if colours == 2 else 4
    raw, before = zlib.decompress(packed), bytes(width * step)
    count = collections.Counter()
    for row in range(height):
        begin = row * (width * step + 1)
        line = bytearray(raw[begin + 1 : begin + 1 + width * step])
        unfilter(raw[begin], line, before, step)
        count.update(zip(line[0::step], line[1::step], line[2::step], strict=True))
        before = line
    return count


def rgb(colour):
    """Red, green and blue of "hsl(H S% L%)", from 0 to 255."""
    hue, saturation, light = (float(number) for number in re.findall(r"[\d.]+", colour))
    return [255 * part for part in colorsys.hls_to_rgb(hue / 360, light / 100, saturation / 100)]


def check_colours(root, count):
    """Every colour covers nearly as many pixels as its rectangles: lines and blurred edges take some."""
    areas = collections.Counter()
    for rect in root.iter("rect"):
        if rect.get("fill"):
            areas[rect.get("fill")] += float(rect.get("width")) * float(rect.get("height"))
    if not areas:
        raise Wrong("the page has no rectangle in a colour")
    for colour, area in areas.items():
        wanted = rgb(colour)
        seen = sum(
            n for pixel, n in count.items() if all(abs(a - b) < 1.6 for a, b in zip(pixel, wanted, strict=True))
        )
        if not 0.7 * area < seen < 1.1 * area + 50:
            raise Wrong(f"{colour} should cover {area:.0f} pixels, and covers {seen}")


def check_map_colours(root, count):
    """Every pair's colour is in the image: a cell has some thousand pixels, less those of letters and edges."""
    for cell in root.iter("td"):
        wanted = rgb(cell.get("style").split("background:")[1].split(")")[0])
        seen = sum(
            n for pixel, n in count.items() if all(abs(a - b) < 1.6 for a, b in zip(pixel, wanted, strict=True))
        )
        if seen < 500:
            raise Wrong(f"{cell.get('style')} should be seen, and covers {seen} pixels")


def look(browser, folder, file, text=None):
    """Lets the browser draw a page, and compares the result with the page's text (or with `text`)."""
    image = Path(folder) / "image.png"
    image.unlink(missing_ok=True)
    root = ElementTree.fromstring(text or file.read_text())
    check_elements(root, browse(browser, folder, "--dump-dom", file.as_uri()))
    browse(browser, folder, f"--screenshot={image}", file.as_uri())
    count = pixels_of(image)
    if root.find(".//table[@class='heat']") is not None:
        check_map_colours(root, count)
    else:
        check_colours(root, count)


def spoiled(file, before, after):
    """A copy of a page in which one text is replaced."""
    copy = file.with_name("spoiled.html")
    copy.write_text(file.read_text().replace(before, after))
    return copy


def main():
    """Runs all cases."""
    cases = Cases()
    browser = sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        pages = make_pages(sys.argv[1], folder)
        for name, file, _ in pages:
            cases.case(f"{name}, in the browser", look, browser, folder, file)
        file = pages[0][1]
        hidden = spoiled(file, "</style>", "rect{visibility:hidden}</style>")
        cases.case("cells that are not drawn are noticed", look, browser, folder, hidden, wrong=True)
        broken = spoiled(file, "</style>", "")
        cases.case(
            "an element that is not closed is noticed",
            look,
            browser,
            folder,
            broken,
            file.read_text(),
            wrong=True,
        )
        loud = spoiled(file, "<h1>", '<img src="http://192.0.2.1/x.png" alt=""/><h1>')
        cases.case("what the page may not load is noticed", look, browser, folder, loud, wrong=True)
    return cases.finish()


if __name__ == "__main__":
    sys.exit(main())
