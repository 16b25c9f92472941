"""linnet analyze: tables, JSON, pages, files, exit codes and sentences."""

import html.parser
import json
import os
import pathlib
import subprocess
import sys

import pytest
from browser import WIDTHS, check_page, needs_browser

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


@pytest.mark.parametrize(
    ("mixer", "says"),
    [("retention", None), ("ssd", None), ("lru", "its eigenvalues are complex, but a normaliser"), ("s5", "its eigenvalues are complex"),
     ("gla", "its L_t is no single number")],
)  # fmt: skip
def test_a_decay_as_a_normaliser(mixer, says):
    """n_t = -sum log a_t wants real decays above 0; where they are not, the report says why it has none."""
    report = json.loads(linnet("analyze", "dsf", mixer, "--tokens", "12", "--json").stdout)["mixers"][0]
    assert (len(report["normaliser"]) == 12 and "no_normaliser" not in report) if says is None else (says in report["no_normaliser"] and "normaliser" not in report)


def test_two_mixers_side_by_side(tmp_path):
    page, tensors = tmp_path / "page.html", tmp_path / "out.safetensors"
    text = linnet("analyze", "dsf", "linear", "normalised", "--html", str(page), "--out", str(tensors)).stdout
    assert "State expansion" in text and "Normalisation" in text and "Recurrence" in text
    assert tensors.stat().st_size > 2 * 64 * 64 * 8
    drawings = Page(page.read_text()).drawings
    assert len(drawings) == 8 and all(marks > 3 for marks in drawings)


@pytest.mark.parametrize("name", ["gla-plain", "delta-plain", "linear-plain", "gated_delta-vector", "decay-retention", "dsf-s6", "dsf-softmax",
                                  "zeros-core", "zeros-zeroth", "zeros-softmax", "h3-basic", "h3-heads", "h3-zoh", "metala-map"])  # fmt: skip
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
        (("dsf", "s4d", "discretise=euler"), "discretise is 'euler', expected none or zoh"),
        (("icl", "retrieval_limit", "--train"), "nothing to train"),
        (("icl", "--train", "steps=0"), "steps is 0"),
        (("icl", "steps=5"), "there is no option 'steps'"),
        (("icl", "spectrum=2"), "spectrum is 2.000000"),
        (("icl", "fulll"), "there is no formula 'fulll'"),
        (("icl", "rank", "rank=9"), "rank is 9, expected 0 to d (5)"),
        (("icl", "alpha=2"), "alpha is 2.000000, expected 0 to 1"),
        (("icl", "n=-1"), "n is -1, expected 0 to 20000"),
        (("dsf", "gla", "--html", "/nonexistent/page.html"), "/nonexistent"),
    ],
)
def test_bad_input(words, says):
    assert says in linnet("analyze", *words, code=2).stderr


TRAINED = ("icl", "full", "drift_h3", "--train", "n=4,6", "d=2", "steps=300", "batch=128")


def test_icl_trains_the_layers(tmp_path):
    found = json.loads(linnet("analyze", *TRAINED, "--json").stdout)["trained"]
    assert [(m["formula"], m["layer"], m["n"]) for m in found] == [(f, layer, n) for f, layer in (("full", "attention"), ("full", "h3"), ("drift_h3", "h3")) for n in (4, 6)]
    assert all(abs(m["off"]) < 0.02 and m["step_cosine"] > 0.98 for m in found)


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", [("dsf", "linear", "normalised", "s6", "s5"), ("icl",), TRAINED], ids=["dsf", "icl", "trained"])
def test_pages_in_a_browser(words, width, tmp_path):
    page = tmp_path / "page.html"
    linnet("analyze", *words, "--html", str(page))
    check_page(page, width, tmp_path)


# ---- models


def make_model(folder, poison=None, inner=48):
    """Two blocks of grouped softmax attention with random weights, 512 tokens of context."""
    np, save_file = pytest.importorskip("numpy"), pytest.importorskip("safetensors.numpy").save_file
    pytest.importorskip("tokenizers")
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    from model_files import save_tokenizer

    random = np.random.default_rng(1)
    shapes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32),
              "mlp.gate_proj": (inner, 32), "mlp.up_proj": (inner, 32), "mlp.down_proj": (32, inner)}  # fmt: skip
    tensors = {"model.embed_tokens.weight": random.normal(size=(300, 32)), "model.norm.weight": np.ones(32)}
    for i in range(2):
        tensors |= {f"model.layers.{i}.{name}.weight": random.normal(size=shape) / 4 for name, shape in shapes.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": np.ones(32) for name in ("input_layernorm", "post_attention_layernorm")}
    if poison:
        tensors[poison][0] = 3e38  # finite, but not what comes of it
    save_file({name: y.astype(np.float32) for name, y in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512, "tie_word_embeddings": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    (folder / "text.txt").write_text("the linnet is a small finch of the open country " * 40)
    (folder / "short.txt").write_text("the linnet")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def test_heads_of_a_model(model):
    words = ("analyze", str(model), "--text", str(model / "text.txt"), "--tokens", "160")
    found = json.loads(linnet(*words, "--json").stdout)
    assert [(head["layer"], head["head"]) for head in found["heads"]] == [(i, h) for i in range(2) for h in range(4)]
    for head in found["heads"]:
        assert 0 <= head["entropy_ratio"] <= 1 and 1 <= head["stable_rank"] <= head["effective_rank"] * 1.0001
        assert head["kl_window_64+sinks"] <= head["kl_window_64"] + 1e-9 and head["dof"] > 1
        assert all(head[name] >= 0 for name in found["measures"] if name.startswith("kl_"))
        assert head["query_pairs"] > 1000 and 0 <= head["confused_softmax"] <= head["query_pairs"] and head["margin_inline"] > 0
    assert [layer["mixer"] for layer in found["layers"]] == ["softmax_attention"] * 2
    assert all(layer["largest"] > layer["median"] > 0 for layer in found["layers"])
    lines = linnet(*words, "--csv").stdout.splitlines()
    assert len(lines) == 9 and lines[0].startswith("layer,head,entropy") and len(lines[1].split(",")) == len(lines[0].split(","))
    assert "largest activation" in linnet(*words).stdout
    all_alike = json.loads(linnet(*words, "--alike", "2", "--apart", "1e-6", "--json").stdout)["heads"]
    assert all(head["confused_linear"] >= 0.9 * head["query_pairs"] for head in all_alike)  # weights differ by 2 at most


PEAK = """import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)"""


def test_memory_of_a_long_text(tmp_path):
    """What lies inside a block is never held for the whole text: one row of the MLP alone has 16 KiB here."""
    model = make_model(tmp_path, inner=4096)
    (model / "text.txt").write_text("the linnet is a small finch of the open country " * 4000)
    peaks = {}
    for tokens in (4096, 12288):
        words = ["analyze", str(model), "--text", str(model / "text.txt"), "--tokens", str(tokens), "--rows", "8", "--samples", "64", "--threads", "1", "--json"]
        done = subprocess.run([sys.executable, "-c", PEAK, LINNET, *words], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert "note: the model was made for 512 tokens" in done.stderr
        peaks[tokens] = int(done.stdout)
    assert peaks[12288] - peaks[4096] < 8192 * 8, peaks  # KiB: half such a row a token


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_model_in_a_browser(width, model, tmp_path):
    page = tmp_path / "heads.html"
    linnet("analyze", str(model), "--text", str(model / "text.txt"), "--tokens", "160", "--html", str(page))
    assert page.read_text().count("<svg") > 10
    check_page(page, width, tmp_path)


def test_a_layer_of_a_model_as_a_system(model):
    words = ("--text", str(model / "text.txt"), "--layer", "1", "--head", "3", "--tokens", "48")
    found = json.loads(linnet("analyze", str(model), "linear", "taylor", *words, "--json").stdout)["mixers"]
    assert [report["mixer"] for report in found] == ["softmax", "linear", "taylor"] and all(report["ok"] for report in found)
    assert "the model's own kernel gives the system's output within" in linnet("analyze", str(model), *words).stdout


LAYER_FILES = ["gla-layer", "delta-layer", "gated_delta-gdn-layer", "gated_delta-kda-layer", "mamba-s6-layer", "mamba-ssd-layer",
               "decay-retention-layer", "gated-layer-g1", "zeros-layer", "metala-layer", "fem-layer"]  # fmt: skip


@pytest.mark.parametrize("name", LAYER_FILES)
def test_layer_files(name):
    report = json.loads(linnet("analyze", "dsf", "--file", str(ROOT / f"tests/vectors/{name}.safetensors"), "--json").stdout)["mixers"][0]
    assert report["ok"] and report["spectral_radius_q90"] <= 1 + 1e-9


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--layer", "2"), "the model has layers 0 to 1, but --layer is 2"),
        (("--layer", "1", "--head", "4"), "layer 1, softmax_attention: it has heads 0 to 3, but --head is 4"),
        (("--windows", "400", "--tokens", "200"), "tokens, no more than the window of 400; take a longer text or smaller --windows"),
        (("--windows", "0"), "--windows has 0, expected at least 1"),
        (("--tokens", "2000000"), "2000000"),
        (("gla",), "'gla' is one word too many; other mixers stand beside a layer: --layer N"),
        (("gla", "--layer", "0"), "dsf: gla: it needs a tensor alpha"),
        (("glaa", "--layer", "0"), "there is no mixer 'glaa'; did you mean 'gla'?"),
    ],
)
def test_bad_input_for_a_model(words, says, model):
    assert says in linnet("analyze", str(model), *words, "--text", str(model / "text.txt"), code=2).stderr


def test_a_text_shorter_than_the_window(model):
    assert "no more than the window of 64" in linnet("analyze", str(model), "--text", str(model / "short.txt"), code=2).stderr


def test_broken_activations_are_named_by_their_layer(tmp_path):
    broken = make_model(tmp_path, poison="model.layers.1.mlp.down_proj.weight")
    said = linnet("analyze", str(broken), "--text", str(broken / "text.txt"), code=2).stderr
    assert "layer 1: its output is not finite at token" in said and "channel 0" in said
