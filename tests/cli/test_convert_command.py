"""linnet convert and linnet analyze MODEL: a small llama without a tokeniser's training, exit codes and sentences."""

import json
import os
import pathlib
import subprocess

import pytest

np = pytest.importorskip("numpy")
save_file = pytest.importorskip("safetensors.numpy").save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"
C, I, V, LAYERS = 32, 48, 64, 2


def linnet(*words, code=0):
    done = subprocess.run([LINNET, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = {"model_type": "llama", "vocab_size": V, "hidden_size": C, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": I, "max_position_embeddings": 512, "tie_word_embeddings": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = {"self_attn.q_proj": (C, C), "self_attn.k_proj": (C // 2, C), "self_attn.v_proj": (C // 2, C), "self_attn.o_proj": (C, C),
              "mlp.gate_proj": (I, C), "mlp.up_proj": (I, C), "mlp.down_proj": (C, I)}  # fmt: skip
    tensors = {"model.embed_tokens.weight": random.normal(size=(V, C)), "model.norm.weight": np.ones(C)}
    for i in range(LAYERS):
        tensors |= {f"model.layers.{i}.{name}.weight": random.normal(size=shape) / 4 for name, shape in shapes.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": np.ones(C) for name in ("input_layernorm", "post_attention_layernorm")}
    save_file({name: y.astype(np.float32) for name, y in tensors.items()}, folder / "model.safetensors")
    return folder


def test_without_a_text_it_works_and_says_that_it_is_unreliable(model, tmp_path):
    words = ("--budget", 0.5, "--length", 256, "--windows", "8,32", "--eval-tokens", 256, "--quick", "--zero-shot")
    out = linnet("convert", model, "--out", tmp_path / "fast", *words).stdout
    assert "UNRELIABLE" in out and "perplexity ratio" in out
    assert {"config.json", "model.safetensors", "report.html", "report.json", "report.md"} <= {file.name for file in (tmp_path / "fast").iterdir()}
    assert not (tmp_path / "fast.work").exists()
    section = json.loads((tmp_path / "fast" / "config.json").read_text())["linnet"]
    assert section["format"] == 1 and section["layers"] and set(section["source"]) == {"config.json", "model.safetensors"}
    blocks = json.loads(linnet("info", tmp_path / "fast", "--json").stdout)["blocks"]
    assert any("window" in block["mixer"] for block in blocks)
    plan = json.loads(linnet("convert", model, "--out", tmp_path / "dry", *words, "--dry-run", "--json").stdout)
    assert len(plan["layers"]) == LAYERS and plan["cost"] <= 0.5 and not list(tmp_path.glob("dry*"))


@pytest.mark.parametrize(
    "words, code, sentence",
    [
        ((), 2, "where to?"),
        (("--out", "x", "--budget", "0"), 2, "budget is 0"),
        (("--out", "x", "--budget", "2"), 2, "budget"),
        (("--out", "/nowhere/x", "--zero-shot"), 2, "there is no such folder"),
        (("--out", "x"), 2, "which text?"),
        (("--out", "x", "--zero-shot", "--text", "README.md"), 2, "has no tokenizer.json"),
        (("--out", "x", "--zero-shot", "--windows", "4,y"), 2, "--windows holds 'y'"),
        (("--out", "x", "--zero-shot", "--budget", "0.0001"), 3, "the cheapest plan costs"),
    ],
)
def test_what_is_refused(model, tmp_path, monkeypatch, words, code, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("a text\n\n" * 100)
    assert sentence in linnet("convert", model, *words, code=code).stderr
    assert not (tmp_path / "x").exists()


def test_heads_of_a_model_without_a_tokenizer(model):
    assert "measured on random tokens: the model has no tokenizer" in linnet("analyze", model).stdout


def test_no_model():
    assert "which model?" in linnet("convert", code=2).stderr
