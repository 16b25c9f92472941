"""A page in headless Chromium: what its console says, whether it is wider than the window, whether every drawing has marks and a name.

Skips where there is no Chromium.
"""

import html
import re
import shutil
import subprocess

import pytest

WIDTHS = [400, 1400]  # a telephone, a desk
needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")


def check_page(page, width, folder):
    """Opens the page in a frame of this width (a window of Chromium has at least 500 pixels) and fails on console lines, overflow or an empty drawing."""
    measure = (
        "const d = this.contentDocument.documentElement, marks = 'rect, circle, polygon, polyline, path';"
        "const bad = [...d.querySelectorAll('svg')].filter(s => s.querySelectorAll(marks).length < 1 || !s.getAttribute('aria-label'));"
        "const stuck = [...d.querySelectorAll('.wide')].filter(each => each.tabIndex < 0);"
        "document.title = 'frame ' + this.clientWidth + ' over ' + (d.scrollWidth - this.clientWidth) + ' bad ' + bad.length + ' stuck ' + stuck.length"
    )
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(page.read_text())}" onload="{measure}"></iframe>'
    outer = folder / f"frame-{width}.html"
    outer.write_text(f"<!DOCTYPE html><html><body style='margin:0'>{frame}</body></html>")
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000", "--enable-logging=stderr"]
    words += [f"--user-data-dir={folder}/profile", "--dump-dom", outer.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, f"{page}: the console says {said[:3]}"
    measured = re.search(r"<title>frame (\d+) over (-?\d+) bad (\d+) stuck (\d+)</title>", done.stdout)
    assert measured and int(measured.group(1)) == width, done.stderr[-500:]
    assert int(measured.group(2)) <= 0, f"{page} is {measured.group(2)} pixels wider than a window of {width}"
    assert measured.group(3) == "0", f"{page}: {measured.group(3)} drawings without marks or without a name"
    assert measured.group(4) == "0", f"{page}: {measured.group(4)} parts scroll, but no key reaches them"
