"""linnet analyze: tables, JSON, pages, files, exit codes and sentences."""

import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"


def linnet(*words, code=0):
    done = subprocess.run([LINNET, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


class Page(html.parser.HTMLParser):
    """Tags that are opened and closed in order, drawings that hold marks, nothing fetched from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.drawings, self.marks = [], [], 0
        self.feed(text)
        assert not self.open
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', '')
        assert "http" not in text and "<script" not in text and "prefers-color-scheme: dark" in text

    def handle_starttag(self, tag, attributes):
        if tag in ("meta",):
            return
        self.open.append(tag)
        if tag == "svg":
            self.drawings.append(0)
            assert dict(attributes).get("aria-label")
        if tag in ("rect", "circle", "polygon", "polyline", "path"):
            self.drawings[-1] += 1

    def handle_startendtag(self, tag, attributes):
        if tag in ("rect", "circle", "polygon", "polyline", "path"):
            self.drawings[-1] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def mixers():
    lines = linnet("analyze", "dsf").stdout.splitlines()
    return [line.split()[0] for line in lines[1:] if line and not line.startswith("linnet")]


def test_every_mixer_is_reproduced_by_its_system():
    names = mixers()
    assert len(names) >= 18
    reports = json.loads(linnet("analyze", "dsf", *names, "--tokens", "24", "--keys", "3", "--values", "2", "--json").stdout)["mixers"]
    assert [report["mixer"] for report in reports] == names
    for report in reports:
        assert report["ok"] and report["recurrence_error"] < 1e-10, report["mixer"]
        assert len(report["memory_length"]) == 24


def test_two_mixers_side_by_side(tmp_path):
    page, tensors = tmp_path / "page.html", tmp_path / "out.safetensors"
    text = linnet("analyze", "dsf", "linear", "normalised", "--html", str(page), "--out", str(tensors)).stdout
    assert "State expansion" in text and "Normalisation" in text and "Recurrence" in text
    assert tensors.stat().st_size > 2 * 64 * 64 * 8
    drawings = Page(page.read_text()).drawings
    assert len(drawings) == 8 and all(marks > 3 for marks in drawings)


@pytest.mark.parametrize("name", ["gla-plain", "delta-plain", "linear-plain", "gated_delta-vector", "decay-retention", "dsf-s6", "dsf-softmax"])
def test_vector_files(name):
    report = json.loads(linnet("analyze", "dsf", "--file", str(ROOT / f"tests/vectors/{name}.safetensors"), "--json").stdout)["mixers"][0]
    assert report["ok"]


def test_icl(tmp_path):
    page = tmp_path / "icl.html"
    losses = json.loads(linnet("analyze", "icl", "d=5", "n=20", "drift=0.9", "--json", "--html", str(page)).stdout)["losses"]
    assert losses["full"][0] == pytest.approx(1.1538, abs=1e-4)
    assert losses["drift_attention"][0] == pytest.approx(4.086, abs=1e-3)
    assert losses["drift_h3"][0] == pytest.approx(3.468, abs=1e-3)
    Page(page.read_text())
    assert "drift_h3" in linnet("analyze", "icl", "drift_h3", "n=1,2").stdout


def test_vectors_are_verified():
    files = [str(p) for kind in ("dsf", "icl") for p in sorted((ROOT / "tests/vectors").glob(f"{kind}-*.safetensors"))]
    assert "0 failed, 0 skipped" in linnet("check", *files).stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "it needs a subject"),
        (("dfs",), "there is no 'dfs', expected dsf or icl"),
        (("dsf", "gla2"), "there is no mixer 'gla2'; did you mean 'gla'?"),
        (("dsf", "gla", "gamm=1"), "there is no option 'gamm'"),
        (("dsf", "taylor", "order=9"), "order is 9, expected 0 to 8"),
        (("dsf", "gla", "--tokens", "5000"), "5000"),
        (("dsf", "--file", str(ROOT / "tests/vectors/gla-plain.safetensors"), "--head", "9"), "but --head is 9"),
        (("dsf", "--file", str(ROOT / "tests/vectors/softmax-full.safetensors")), "its attention is not causal"),
        (("dsf", "--file", str(ROOT / "tests/vectors/fem-aft.safetensors")), "its mechanism is 'fem'"),
        (("dsf", "--file", "/nonexistent"), "/nonexistent"),
        (("icl", "fulll"), "there is no formula 'fulll'"),
        (("icl", "rank", "rank=9"), "rank is 9, expected 0 to d (5)"),
        (("icl", "alpha=2"), "alpha is 2.000000, expected 0 to 1"),
        (("icl", "n=-1"), "n is -1, expected 0 to 20000"),
        (("dsf", "gla", "--html", "/nonexistent/page.html"), "/nonexistent"),
    ],
)
def test_bad_input(words, says):
    assert says in linnet("analyze", *words, code=2).stderr


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("words", [("dsf", "linear", "normalised", "s6"), ("icl",)], ids=lambda words: words[0])
def test_pages_fit_the_window(words, width, tmp_path):
    page = tmp_path / "page.html"
    linnet("analyze", *words, "--html", str(page))
    measure = "<script>document.title = 'wide ' + (document.documentElement.scrollWidth - window.innerWidth)</script></body>"
    page.write_text(page.read_text().replace("</body>", measure))
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run([*browser, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    over = re.search(r"<title>wide (-?\d+)</title>", done.stdout)
    assert over and int(over.group(1)) <= 0, done.stderr[-500:]
