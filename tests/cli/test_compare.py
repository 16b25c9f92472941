"""linnet compare: table, JSON, page, inputs, exit codes and sentences."""

import html.parser
import json
import math
import os
import pathlib
import resource
import signal
import struct
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"
QUICK = ("compare", "--quick", "--longest", "512")


def linnet(*words, code=0):
    done = subprocess.run([LINNET, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


def write_safetensors(path, tensors, metadata=None):
    """tensors: name -> shape, with float32 values that differ from each other, or (shape, values)."""
    header, data = ({"__metadata__": metadata} if metadata else {}), b""
    for name, shape in tensors.items():
        shape, values = shape if isinstance(shape, tuple) else (shape, None)
        count = math.prod(shape)
        values = values or [((7 * i + len(name)) % 11 - 5) / 4 for i in range(count)]
        values = struct.pack(f"<{count}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


@pytest.fixture(scope="module")
def page_and_result(tmp_path_factory):
    path = tmp_path_factory.mktemp("compare") / "page.html"
    done = linnet(*QUICK, "--html", str(path), "--json")
    return path.read_text(), json.loads(done.stdout)


def test_json(page_and_result):
    _, result = page_and_result
    assert result["input"]["T"] == 256 and result["input"]["layers"] == ["layer0", "layer3", "layer5"]
    exact = result["variants"][0]
    assert exact["name"] == "softmax exact" and exact["error"] < 1e-5 and exact["growth_exponent"] == pytest.approx(2, abs=0.01)
    assert {variant["operator"] for variant in result["variants"]} >= {"softmax", "linear"}
    for variant in result["variants"]:
        assert 0 <= variant["error"] < 10 and -1 <= variant["cosine"] <= 1.0001
        assert [len(layer) for layer in variant["head_errors"]] == [12, 12, 12]
        assert variant["times"][0]["T"] == 256 and variant["times"][0]["seconds"] == variant["seconds"]["median"]
        assert variant["error"] < result["average_error"] + 1  # an attention far worse than looking at nothing is a mistake
    assert len(result["summary"]) >= 3


def test_page_is_complete_in_itself(page_and_result):
    page, result = page_and_result
    for variant in result["variants"]:
        assert variant["name"] in page
    for piece in ("<script", "src=", "href=", "url(", "@import", "javascript:"):
        assert piece not in page
    assert page.replace('xmlns="http://www.w3.org/2000/svg"', "").count("http") == 0
    assert page.count("<svg") == 3 and "prefers-color-scheme: dark" in page
    assert result["machine"]["cpu"] in page and result["date"] in page


def test_page_is_well_formed(page_and_result):
    page, _ = page_and_result
    open_tags = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br"):
                open_tags.append(tag)

        def handle_startendtag(self, tag, attrs):
            assert tag in ("line", "rect", "circle", "polygon", "polyline")

        def handle_endtag(self, tag):
            assert open_tags and open_tags.pop() == tag

    Parser().feed(page)
    assert open_tags == []


def test_table(tmp_path):
    text = linnet(*QUICK, "--layers", "0", "--causal", "--threads", "1", "--dtype", "bf16").stdout
    assert "1 layer, causal; 1 thread" in text and "softmax exact" in text and "linear elu1" in text


def test_length_repeats_or_cuts_the_input():
    for length in (10, 300):
        result = json.loads(linnet(*QUICK, "--length", str(length), "--layers", "layer5", "--json").stdout)
        assert result["input"]["T"] == length and result["variants"][0]["error"] < 1e-5


@pytest.mark.parametrize("tensors", [
    {"q": [2, 20, 4, 8], "k": [2, 20, 2, 8], "v": [2, 20, 2, 16]},
    {"a.q": [20, 4, 8], "a.k": [20, 4, 8], "a.v": [20, 4, 8], "b.q": [20, 4, 8], "b.k": [20, 4, 8], "b.v": [20, 4, 8]},
])
def test_own_input(tmp_path, tensors):
    path = write_safetensors(tmp_path / "input.safetensors", tensors, {"scale": "0.5", "causal": "true"})
    result = json.loads(linnet(*QUICK, "--input", path, "--json").stdout)
    assert result["input"]["causal"] and result["input"]["H"] == 4
    assert result["variants"][0]["error"] < 1e-5


def test_grouped_heads_are_repeated_where_an_operator_takes_none(tmp_path):
    def errors(tensors):
        path = write_safetensors(tmp_path / "input.safetensors", tensors)
        result = json.loads(linnet(*QUICK, "--input", path, "--json").stdout)
        assert not result["left_out"]
        return {v["name"]: v["error"] for v in result["variants"]}, {v["name"] for v in result["variants"] if v["repeated_heads"]}
    rows = [(17 * i % 11 - 5) / 4 for i in range(2 * 2 * 8)]  # [2, 2 heads, 8]
    heads = [row for t in (0, 16) for row in 2 * rows[t:t + 8] + 2 * rows[t + 8:t + 16]]  # each head twice
    values = {"q": ([2, 4, 8], [(23 * i % 13 - 6) / 5 for i in range(64)]), "k": ([2, 2, 8], rows), "v": ([2, 2, 8], rows)}
    grouped, repeated = errors(values)
    alike, none = errors({**values, "k": ([2, 4, 8], heads), "v": ([2, 4, 8], heads)})
    assert not none and {"monarch", "taylor_exact"} <= repeated and not {"softmax exact", "linear elu1"} & repeated
    assert grouped == pytest.approx(alike, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("tensors, metadata, piece", [
    ({"x": [1]}, None, 'has no tensor "q"'),
    ({"q": [4, 2, 8]}, None, '"k"'),
    ({"q": [4, 2, 8], "k": [4, 2, 4], "v": [4, 2, 8]}, None, '"k" has 4 channels, expected 8'),
    ({"q": [4, 2, 8], "k": [5, 2, 8], "v": [5, 2, 8]}, None, '"k" has 5 tokens, expected 4'),
    ({"q": [4, 4, 8], "k": [4, 3, 8], "v": [4, 3, 8]}, None, "3 key heads do not divide the 4 query heads"),
    ({"q": [2, 8], "k": [2, 8], "v": [2, 8]}, None, "has 2 dimensions, expected [B, T, H, D]"),
    ({"q": [0, 2, 8], "k": [0, 2, 8], "v": [0, 2, 8]}, None, "has 0 tokens"),
    ({"q": [4, 2, 8], "k": [4, 2, 8], "v": [4, 2, 8]}, {"scale": "big"}, "the scale in the metadata is 'big'"),
    ({"q": [4, 2, 8], "k": [4, 2, 8], "v": [4, 2, 8]}, {"causal": "yes"}, "causal in the metadata is 'yes'"),
])
def test_wrong_files_are_told_in_one_sentence(tmp_path, tensors, metadata, piece):
    path = write_safetensors(tmp_path / "input.safetensors", tensors, metadata)
    done = linnet(*QUICK, "--input", path, code=2)
    assert piece in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("words, piece", [
    (["lamp"], "'lamp' was given"),
    (["--input", "/nowhere/x.safetensors"], "/nowhere/x.safetensors"),
    (["--layers", "7"], "there is no layer '7', expected some of layer0, layer3, layer5"),
    (["--length", "0"], "length"),
    (["--dtype", "f31"], "--dtype is 'f31'"),
    (["--html", "/nowhere/page.html"], "/nowhere/page.html"),
    (["--lamp"], "lamp"),
])
def test_bad_input_is_told_in_one_sentence(words, piece):
    done = linnet(*QUICK, *words, code=2)
    assert piece in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_results_that_are_not_finite_or_nothing_have_a_page(tmp_path):
    """Overflow in f16, and a head whose values are 0."""
    values = [(5 * i % 11 - 5) / 4 for i in range(6 * 2 * 8)]
    huge, pruned = [1e5 * x for x in values], [x if i // 8 % 2 else 0.0 for i, x in enumerate(values)]
    for v, words in ((huge, ["--dtype", "f16"]), (pruned, [])):
        path = write_safetensors(tmp_path / "input.safetensors", {name: ([6, 2, 8], v if name == "v" else values) for name in "qkv"})
        done = linnet(*QUICK, "--input", path, "--html", str(tmp_path / "page.html"), *words)
        assert "softmax exact" in done.stdout and (tmp_path / "page.html").read_text().endswith("</html>\n")
    path = write_safetensors(tmp_path / "input.safetensors", {**dict.fromkeys("qk", [6, 2, 8]), "v": ([6, 2, 8], [0.0] * 96)})
    assert "exact attention gives 0 everywhere, there is nothing to compare with" in linnet(*QUICK, "--input", path, code=2).stderr


def test_a_page_that_does_not_fit_takes_no_number_along(tmp_path):
    tensors = {name: [20, 4, 8] for name in "qkv"}
    path, page = write_safetensors(tmp_path / "input.safetensors", tensors), tmp_path / "page.html"
    done = subprocess.run([LINNET, *QUICK, "--input", path, "--html", page, "--json"], capture_output=True, text=True, timeout=300,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)), restore_signals=False)
    assert done.returncode == 2 and done.stderr == f"linnet: {page}: cannot be written: File too large\n"
    assert json.loads(done.stdout)["variants"] and not list(tmp_path.glob("page*"))


def test_an_interrupt_leaves_no_file(tmp_path):
    words = ["compare", "--time", "60", "--html", tmp_path / "page.html"]
    with subprocess.Popen([LINNET, *words], stdout=subprocess.DEVNULL) as running:
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(timeout=1)
        running.terminate()  # a shell's background jobs do not hear SIGINT
    assert running.returncode == -signal.SIGTERM and not list(tmp_path.iterdir())


def test_a_file_that_is_no_safetensors(tmp_path):
    path = tmp_path / "noise"
    path.write_bytes(bytes(range(256)) * 4)
    assert str(path) in linnet(*QUICK, "--input", str(path), code=2).stderr
