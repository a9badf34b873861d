#!/usr/bin/env python3
"""Checks the pages of `ringfence report` in a headless Chromium.

check.py --axe AXE.js --assets DIR [--write] [--keep DIR] SAMPLE.html HOSTILE.html

The script compares the sample with the pictures in the directory of --assets; --write replaces
them. --keep stores all pictures and the printed page. Needs the package websocket-client.
"""

import argparse
import base64
import pathlib
import shutil
import sys

from browser import Browser

PROGRAMS = ["chromium", "chromium-browser", "google-chrome"]
WIDE, PHONE = 1280, 360
# Name, width, height (None: the whole page), scale, colour scheme.
PICTURES = [
    ("page-light", WIDE, 1500, 0.7, "light"),
    ("page-dark", WIDE, 1500, 0.7, "dark"),
    ("page-phone-light", PHONE, 1400, 0.75, "light"),
    ("page-phone-dark", PHONE, 1400, 0.75, "dark"),
    ("page-whole", WIDE, None, 0.2, "light"),
]
# Maximum size of a committed picture, in bytes.
LARGEST = 120 << 10
# Maximum difference of two pixels in one colour channel, 0 to 255. The antialiasing of rasterizers
# differs.
TOLERANCE = 40
FONT = "DejaVu Sans"

# Returns the texts whose contrast with their background is below 4.5.
CONTRAST = """
(() => {
  const parse = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    return { rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1 };
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => {
      value /= 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    for (let up = element; up; up = up.parentElement) {
      const colour = parse(getComputedStyle(up).backgroundColor);
      if (colour.alpha === 1) return colour.rgb;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const bad = [];
  let texts = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest('script, style, svg > title, option')) continue;
    if (!element.checkVisibility()) continue;
    texts += 1;
    const style = getComputedStyle(element);
    const ink = parse(element.closest('svg') ? style.fill : style.color);
    const [high, low] = [luminance(ink.rgb), luminance(background(element))].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5 || ink.alpha < 1) bad.push(`${node.data.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return { texts, bad };
})()
"""

# Returns the order of a column: its texts, or its numbers, with null for a missing number.
COLUMN = """
((table, column) => {
  const rows = [...document.querySelectorAll('table.sortable')[table].tBodies[0].rows];
  const cells = rows.map((row) => row.cells[column]);
  const number = (cell) => 'value' in cell.dataset ? Number(cell.dataset.value) : null;
  const heading = document.querySelectorAll('table.sortable')[table].tHead.rows[0].cells[column];
  return {
    sort: heading.getAttribute('aria-sort'),
    numeric: heading.classList.contains('number'),
    sorted: document.querySelectorAll('table.sortable')[table]
      .querySelectorAll('[aria-sort]').length,
    values: heading.classList.contains('number')
      ? cells.map(number) : cells.map((cell) => cell.textContent),
  };
})
"""
# Changes that a comparison of pictures must find: an element, a digit, a colour, a few pixels.
CHANGES = [
    "document.querySelector('.verdict').remove()",
    "document.querySelector('#modes-0 tbody td.number').firstChild.data = '53'",
    "document.querySelector('#modes-0 tbody td.bad').className = 'number good'",
    "document.querySelector('.verdict').style.paddingTop = '1.1rem'",
]


class Check:
    """Counts checks and prints those that fail."""

    def __init__(self):
        self.failures = []
        self.count = 0

    def that(self, holds, text):
        self.count += 1
        if not holds:
            self.failures.append(text)
            print(f"FAILED: {text}", flush=True)


def is_sorted(values, numeric, descending):
    if not numeric:
        # The browser has its own rules for case and punctuation, so the comparison omits them.
        keys = ["".join(c for c in value.lower() if c.isalnum()) for value in values]
        return keys == sorted(keys, reverse=descending)
    present = [value for value in values if value is not None]
    missing_last = all(value is None for value in values[len(present):])
    return missing_last and present == sorted(present, reverse=descending)


def keyboard(browser, check):
    """Reaches every control with Tab, and sorts every column with Enter and the space bar."""
    # Closed details contain controls as well.
    browser.run("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    browser.run("window.reached = new Set(); document.activeElement.blur(); scrollTo(0, 0)")
    expected = browser.run(
        "document.querySelectorAll('button, input, select, summary, [tabindex=\"0\"]').length"
    )
    reached = 0
    for _ in range(2 * expected + 10):
        browser.press("Tab", 9)
        state = browser.run(
            "(() => { const e = document.activeElement; if (e === document.body) return null;"
            "const s = getComputedStyle(e); const seen = reached.has(e); reached.add(e);"
            "return { seen, text: e.outerHTML.slice(0, 80),"
            "outline: s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2 }; })()"
        )
        if state is None or state["seen"]:
            break
        reached += 1
        check.that(state["outline"], f"no visible focus on {state['text']}")
    check.that(reached == expected, f"Tab reaches {reached} of {expected} controls")

    tables = browser.run("document.querySelectorAll('table.sortable').length")
    check.that(tables >= 4, f"{tables} sortable tables")
    for table in range(tables):
        selected = f"document.querySelectorAll('table.sortable')[{table}]"
        columns = browser.run(f"{selected}.tHead.rows[0].cells.length")
        for column in range(columns):
            button = f"{selected}.tHead.rows[0].cells[{column}].querySelector('button')"
            browser.run(f"{button}.focus()")
            keys = {"ascending": ("Enter", 13, "\r"), "descending": (" ", 32, " ")}
            for direction, key in keys.items():
                browser.press(*key)
                state = browser.run(f"{COLUMN}({table}, {column})")
                where = f"table {table}, column {column}, {direction}"
                check.that(state["sort"] == direction, f"{where}: aria-sort is {state['sort']}")
                check.that(state["sorted"] == 1, f"{where}: {state['sorted']} sorted columns")
                check.that(
                    is_sorted(state["values"], state["numeric"], direction == "descending"),
                    f"{where}: order {state['values'][:8]}",
                )


def filters(browser, check):
    rows = "[...document.querySelector('#modes-0').tBodies[0].rows].filter((row) => !row.hidden)"
    every = browser.run(f"{rows}.length")
    browser.run("document.querySelector('#modes-0-text').focus()")
    browser.send("Input.insertText", text="FENCE")
    shown = browser.run(f"{rows}.map((row) => row.textContent)")
    match = all("fence" in row.lower() for row in shown)
    check.that(0 < len(shown) < every and match, f"the filter shows {shown}")
    output = browser.run("document.querySelector('[data-for=\"modes-0\"] output').textContent")
    check.that(output == f"{len(shown)} of {every} rows", f"the filter says {output}")
    browser.run("document.querySelector('#modes-0-text').select()")
    browser.press("Delete", 46)
    choose = (
        "(() => { const s = document.querySelector('#modes-0-class'); s.value = 'bounded';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    browser.run(choose)
    shown = browser.run(f"{rows}.map((row) => row.cells[1].textContent)")
    check.that(shown and set(shown) == {"bounded"}, f"the choice shows {shown}")


def colours(browser, check, name):
    found = browser.run(CONTRAST)
    check.that(found["texts"] > 300, f"{name}: {found['texts']} texts")
    check.that(not found["bad"], f"{name}: contrast below 4.5: {found['bad'][:10]}")


def accessibility(browser, check, axe, name):
    """Checks the page with axe-core."""
    browser.run(axe + "; undefined")
    found = browser.run(
        "axe.run(document, { resultTypes: ['violations'] }).then((result) => result.violations"
        ".map((it) => `${it.id} (${it.nodes.length}): ${it.nodes[0].html.slice(0, 120)}`))"
    )
    for violation in found:
        check.that(False, f"{name}: axe: {violation}")
    check.that(True, "")


def differ(browser, one, other):
    """Returns the number of pixels that differ: all of them if the sizes differ."""
    (*size, one), (*other_size, other) = browser.pixels(one), browser.pixels(other)
    if size != other_size:
        return max(len(one), len(other)) // 3
    if one == other:
        return 0
    far = [abs(a - b) > TOLERANCE for a, b in zip(one, other)]
    return sum(any(far[at : at + 3]) for at in range(0, len(far), 3))


def pictures(browser, url, check, options):
    taken = {}
    for name, width, height, scale, scheme in PICTURES:
        browser.size(width, 900)
        browser.media(prefers_color_scheme=scheme)
        browser.open(url)
        browser.run("document.fonts.ready.then(() => true)")
        taken[name] = browser.picture(width, height, scale)
    # Pictures of the same page with one small change each.
    changed = {}
    for change in CHANGES:
        browser.size(WIDE, 900)
        browser.media(prefers_color_scheme="light")
        browser.open(url)
        browser.run(change)
        changed[change] = browser.picture(*PICTURES[0][1:4])
    browser.open("about:blank")
    if options.keep:
        for name, picture in taken.items():
            (options.keep / f"{name}.png").write_bytes(picture)
    for name, picture in taken.items():
        path = options.assets / f"{name}.png"
        if options.write:
            path.write_bytes(browser.without_filters(picture))
        if not path.is_file():
            check.that(False, f"{path} does not exist; --write creates it")
            continue
        committed = path.read_bytes()
        check.that(len(committed) <= LARGEST, f"{path}: {len(committed)} bytes")
        pixels = differ(browser, picture, committed)
        print(f"{name}: {pixels} pixels differ", flush=True)
        check.that(pixels == 0, f"{path}: {pixels} pixels differ; --write replaces it")
    for change, picture in changed.items():
        pixels = differ(browser, picture, taken[PICTURES[0][0]])
        print(f"after {change}: {pixels} pixels differ", flush=True)
        check.that(pixels > 0, f"no pixel differs after {change}")


def sample(browser, url, check, options):
    axe = options.axe.read_text()
    browser.size(WIDE, 900)
    browser.media(prefers_color_scheme="light")
    browser.open(url)
    check.that(not browser.errors(), f"errors of the page: {browser.errors()[:5]}")
    for landmark in ("header", "main", "footer"):
        check.that(browser.run(f"document.querySelectorAll('{landmark}').length") == 1, landmark)
    for selector in ("h1", "td", "svg"):
        fonts = browser.fonts(selector)
        check.that(fonts == {FONT}, f"{selector} has the fonts {fonts}; install {FONT}")
    colours(browser, check, "light")
    accessibility(browser, check, axe, "light")
    browser.open(url)
    keyboard(browser, check)
    browser.open(url)
    filters(browser, check)
    browser.run("document.querySelector('#theme').click()")
    colours(browser, check, "dark by the button")
    browser.media(prefers_color_scheme="dark")
    browser.open(url)
    browser.run("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    colours(browser, check, "dark")
    accessibility(browser, check, axe, "dark")
    browser.run("document.querySelector('#theme').click()")
    colours(browser, check, "light by the button")
    check.that(not browser.errors(), f"errors of the page: {browser.errors()[:5]}")

    browser.size(PHONE, 800)
    browser.media(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    browser.open(url)
    browser.run("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    width = browser.run("document.documentElement.scrollWidth")
    check.that(width <= PHONE, f"the page is {width} pixels wide on a phone")
    motion = browser.run("getComputedStyle(document.documentElement).scrollBehavior")
    check.that(motion == "auto", f"with reduced motion, scrolling is {motion}")

    # Without scripts, the page shows all rows but no control.
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(url)
    browser.send("Emulation.setScriptExecutionDisabled", value=False)
    controls = browser.run(
        "[...document.querySelectorAll('button, input, select')]"
        ".filter((it) => it.checkVisibility()).length"
    )
    check.that(controls == 0, f"without scripts, {controls} controls remain")
    check.that(browser.run("document.querySelectorAll('#modes-0 tbody tr').length") > 3, "rows")

    browser.size(WIDE, 900)
    browser.media(prefers_color_scheme="dark")
    browser.open(url)
    printed = browser.pdf()
    sheets = printed.count(b"/Type /Page\n") or printed.count(b"/Type /Page ")
    check.that(0 < sheets <= 16, f"{sheets} sheets of paper")
    browser.media("print", prefers_color_scheme="dark")
    colours(browser, check, "printed")
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    check.that(colour == "rgb(255, 255, 255)", f"the printed page has the background {colour}")
    if options.keep:
        (options.keep / "page.pdf").write_bytes(printed)


def hostile(browser, url, check):
    """Checks a page with device, trace and CPU names that attempt to run a script."""
    browser.size(PHONE, 800)
    browser.media(prefers_color_scheme="light")
    browser.open(url)
    check.that(not browser.errors(), f"hostile: errors of the page: {browser.errors()[:5]}")
    ran = browser.run("typeof window.hostile")
    check.that(ran == "undefined", "hostile: a name ran as a script")
    strange = browser.run("document.querySelectorAll('img, iframe, script, link, base').length")
    check.that(strange == 1, f"hostile: {strange} images, frames, scripts, links and bases, not 1")
    shown = browser.run("document.querySelector('#rings-0').textContent.includes('<script>')")
    check.that(shown, "the hostile name is not shown as text")
    width = browser.run("document.documentElement.scrollWidth")
    check.that(width <= PHONE, f"hostile: the page is {width} pixels wide on a phone")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sample", type=pathlib.Path)
    parser.add_argument("hostile", type=pathlib.Path)
    parser.add_argument("--axe", type=pathlib.Path, required=True)
    parser.add_argument("--assets", type=pathlib.Path, required=True)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit(f"none of {', '.join(PROGRAMS)} is installed")
    check = Check()
    with Browser(program) as browser:
        sample(browser, options.sample.resolve().as_uri(), check, options)
        hostile(browser, options.hostile.resolve().as_uri(), check)
        pictures(browser, options.sample.resolve().as_uri(), check, options)
    print(f"{check.count} checks, {len(check.failures)} failed", flush=True)
    sys.exit(1 if check.failures else 0)


if __name__ == "__main__":
    main()
