"""linnet report: table, JSON and page of runs, finished or not; sentences for what is no run; the page in a browser."""

import html.parser
import json
import os
import pathlib
import re
import subprocess

import pytest
from browser import WIDTHS, check_page, needs_browser

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"


def linnet(*words, code=0, **options):
    done = subprocess.run([LINNET, *words], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


def make_run(folder, layer, top, state, finished=True, task="mqar", score="accuracy", parts=False, **settings):
    """What linnet train writes, with made-up numbers."""
    folder.mkdir(parents=True)
    chosen = {"task": task, "layer": layer, "width": 64, "seed": 0, "task_options": {"length": "64"}, **settings}
    (folder / "settings.json").write_text(json.dumps(chosen))
    lines = []
    for step in range(10, 310, 10):
        train = {"loss": 5 / (1 + step * top / 50)} if score == "accuracy" else {score: 5 / step}
        lines.append({"step": step, "split": "train", **train, "lr": 1e-3, "seconds": step / 10, "tokens": step * 4096})
        if step % 100 == 0:
            values = {"loss": 1.0, score: top * step / 300}
            if parts:
                values["parts"] = [{"part": f"length={n}", "loss": 1.0, score: top / n} for n in (1, 2)]
            lines.append({"step": step, "split": "valid", **values, "seconds": step / 10})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 31')  # still being written
    if finished:
        result = {"test": {score: top}, "parameters": 12345, "state_bytes": state, "seconds": 30.0, "tokens": 1228800, "device": "a <CPU>"}
        (folder / "result.json").write_text(json.dumps(result))
    return str(folder)


@pytest.fixture()
def runs(tmp_path):
    return [
        make_run(tmp_path / "a", "softmax_attention", 0.99, 65536, parts=True),
        make_run(tmp_path / "b", "gated_deltanet", 0.95, 16384, parts=True),
        make_run(tmp_path / "c", "gated_deltanet", 0.80, 4096, parts=True, width=32),
        make_run(tmp_path / "d", "linear_attention", 0.30, 16384, finished=False, parts=True),
    ]


def test_json_and_table(runs, tmp_path):
    read = json.loads(linnet("report", *runs, "--json", "--html", str(tmp_path / "page.html")).stdout)["runs"]
    assert [run["test"] for run in read] == [0.99, 0.95, 0.80, None] and read[3]["last"] == pytest.approx(0.3)
    assert [run["name"] for run in read] == ["softmax_attention width=64", "gated_deltanet width=64", "gated_deltanet width=32", "linear_attention width=64"]
    assert read[0]["steps"] == 300 and read[0]["parts"][1] == {"part": "length=2", "value": 0.495}
    text = linnet("report", *runs[:2], "--html", str(tmp_path / "page.html")).stdout
    assert "99 %" in text and "16 KiB" in text and "page.html" in text


def test_one_run_has_its_page_in_its_folder(runs):
    linnet("report", runs[0])
    page = (pathlib.Path(runs[0]) / "report.html").read_text()
    assert page.count("<svg") == 2 and "What differs" not in page and "a &lt;CPU&gt;" in page


def test_page(runs, tmp_path):
    linnet("report", *runs, cwd=tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3 and "What a state of so many bytes is worth" in page and "Part by part" in page and "What differs" in page
    assert re.search(r"softmax_attention width=64 reaches accuracy 99 %, gated_deltanet width=64 95 %", page)
    for piece in ("<script", "src=", "href=", "url(", "@import", "javascript:"):
        assert piece not in page
    open_tags = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br"):
                open_tags.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            assert open_tags and open_tags.pop() == tag

    Parser().feed(page)
    assert open_tags == []


def test_a_score_that_falls(tmp_path):
    runs = [make_run(tmp_path / name, name, top, 4096, task="text", score="bits_per_byte") for name, top in (("mamba2", 2.5), ("deltanet", 2.25))]
    linnet("report", *runs, "--html", str(tmp_path / "page.html"))
    assert "deltanet reaches bits per byte 2.250 and mamba2 2.500" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("settings.json", None, "is no run of linnet train: it has no settings.json"),
        ("settings.json", "{", "settings.json"),
        ("settings.json", "{}", "it names no task and no layer"),
        ("metrics.jsonl", None, "metrics.jsonl"),
        ("metrics.jsonl", "", "has no line yet"),
        ("metrics.jsonl", "{}\nabc\n", "metrics.jsonl line 2"),
        ("result.json", "[", "result.json"),
    ],
)
def test_what_is_no_run(file, text, says, runs):
    path = pathlib.Path(runs[0]) / file
    path.unlink() if text is None else path.write_text(text)
    assert says in linnet("report", runs[0], code=2).stderr


def test_which_runs():
    assert "which runs?" in linnet("report", code=2).stderr


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 4])
def test_the_page_in_a_browser(count, width, runs, tmp_path):
    page = tmp_path / "page.html"
    linnet("report", *runs[:count], "--html", str(page))
    check_page(page, width, tmp_path)


@needs_browser
@pytest.mark.parametrize(
    ("change", "says"),
    [("<p style='width:700px'>wide</p>", "pixels wider than a window of 400"), ("<script>absent()</script>", "absent is not defined")],
    ids=["too wide", "an error"],
)
def test_the_browser_check_can_fail(change, says, runs, tmp_path):
    page = tmp_path / "page.html"
    linnet("report", *runs, "--html", str(page))
    page.write_text(page.read_text().replace("<main>", "<main>" + change))
    with pytest.raises(AssertionError, match=says):
        check_page(page, 400, tmp_path)


BENCH = {"machine": {"cpu": "a CPU", "cores": 2}, "threads": 2, "date": "2026-11-18", "commit": "abc", "cases": [
    {"operator": "gla", "case": "gla B=1 T=64", "implementation": "avx512", "seconds": {"median": 1e-3}, "flops_per_second": 2e9,
     "share_of_ceiling": 0.4, "error": 1e-7}]}  # fmt: skip
COMPARE = {"input": {"source": "random"}, "summary": ["gla is fastest."], "variants": [
    {"name": "softmax", "operator": "softmax", "error": 0, "cosine": 1, "seconds": {"median": 2e-3}, "state_bytes": None},
    {"name": "gla", "operator": "gla", "error": 0.3, "cosine": 0.9, "seconds": {"median": 1e-3}, "state_bytes": 4096}]}  # fmt: skip


@pytest.fixture()
def results(tmp_path):
    """JSON of the other commands; of bench and compare with made-up numbers."""
    texts = {"dsf": linnet("analyze", "dsf", "linear", "lru", "--json").stdout, "icl": linnet("analyze", "icl", "--json").stdout,
             "bench": json.dumps(BENCH), "compare": json.dumps(COMPARE)}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    return [str(tmp_path / f"{name}.json") for name in texts]


def test_one_page_from_everything(runs, results, tmp_path):
    page = tmp_path / "page.html"
    parts = json.loads(linnet("report", *runs[:2], *results, "--html", str(page), "--json").stdout)["parts"]
    assert [part["kind"] for part in parts] == ["train", "dsf", "icl", "bench", "compare"]
    text = page.read_text()
    assert text.count('href="#part') == 5 and all(f'id="part{i}"' in text for i in range(5)) and text.count("<h1>") == 1
    linnet("report", results[0], "--html", str(tmp_path / "alone.html"))
    linnet("analyze", "dsf", "linear", "lru", "--html", str(tmp_path / "direct.html"))
    assert (tmp_path / "alone.html").read_text().count("<svg") == (tmp_path / "direct.html").read_text().count("<svg")


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_joined_page_in_a_browser(width, runs, results, tmp_path):
    page = tmp_path / "page.html"
    linnet("report", *runs[:2], *results, "--html", str(page))
    check_page(page, width, tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "is no result of linnet analyze, compare, bench or convert"),
        ("[1", "it.json"),
        ('{"kind": "dsf"}', "it has no mixers"),
        ('{"kind": "dsf", "mixers": [{"mixer": "abc"}]}', "its mixer is 'abc'"),
        ('{"kind": "icl"}', "it has no losses"),
        ('{"machine": {}, "cases": []}', "it has no cases"),
        ('{"input": {}, "variants": []}', "it has no variants"),
    ],
)
def test_what_is_no_result(text, says, tmp_path):
    path = tmp_path / "it.json"
    path.write_text(text)
    assert says in linnet("report", str(path), code=2).stderr
