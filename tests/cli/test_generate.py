"""generate, eval, embed and info MODEL: what they print, and their sentences for bad input."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"
sys.path.insert(0, str(ROOT / "tests" / "python"))
from model_files import MINILM, SMOLLM2, WIKITEXT, need, save_tokenizer  # noqa: E402


# Runs its words and prints the peak of their memory, in KiB.
PEAK = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"""


def linnet(*words, text=None, code=0):
    run = subprocess.run([LINNET, *map(str, words)], input=text, capture_output=True, text=True, timeout=300)
    assert run.returncode == code, run.stderr
    return run


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random llama with a byte-level tokenizer that was trained on a sentence."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=600, eos_token_id=0)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_the_same_seed_gives_the_same_text(small):
    words = ["generate", small, "--prompt", "the linnet", "--tokens", 40, "--temperature", 1, "--seed", 3, "--json"]
    first = json.loads(linnet(*words).stdout)
    assert len(first["tokens"]) == 40 or first["reason"] == "end"
    assert [json.loads(linnet(*words, "--threads", n).stdout)["tokens"] for n in (1, 2, 3)] == [first["tokens"]] * 3
    words[words.index("--seed") + 1] = 4
    assert json.loads(linnet(*words).stdout)["tokens"] != first["tokens"]


def test_prompt_from_standard_input_streams_and_reports(small):
    run = linnet("generate", small, "--tokens", 5, text="the linnet is")
    assert "prompt" in run.stderr and "tokens/s" in run.stderr and "state" in run.stderr
    assert run.stdout.endswith("\n")


def test_stop_ends_before_the_text(small):
    whole = json.loads(linnet("generate", small, "--prompt", "the", "--tokens", 60, "--json").stdout)["text"]
    stop = whole[10:13]
    cut = json.loads(linnet("generate", small, "--prompt", "the", "--tokens", 60, "--json", "--stop", stop).stdout)
    assert cut["text"] == whole[: whole.index(stop)] and cut["reason"] == "stop"


def test_eval_scores_every_token_once(small, tmp_path):
    text = tmp_path / "text"
    text.write_text("the linnet is a small finch of the open country " * 20)
    whole = json.loads(linnet("eval", small, "--text", text, "--length", 512, "--json").stdout)["text"]
    parts = json.loads(linnet("eval", small, "--text", text, "--length", 64, "--stride", 32, "--json").stdout)["text"]
    assert parts["scored"] == parts["tokens"] - 1 == whole["tokens"] - 1
    assert parts["windows"] > whole["windows"]
    assert sum(bucket["tokens"] for bucket in parts["positions"]) == parts["scored"]
    table = linnet("eval", small, "--text", text).stdout
    assert "perplexity" in table and "bits per byte" in table and "0-63" in table


def test_eval_recall(small):
    result = json.loads(linnet("eval", small, "--recall", "--length", 256, "--trials", 2, "--json").stdout)["recall"]
    assert [(r["task"], r["length"], r["trials"]) for r in result] == [("passkey", 256, 2), ("associative", 256, 2)]


def test_info_of_a_model(small):
    text = linnet("info", small).stdout
    assert "softmax_attention" in text and "glu silu 96" in text and "600 tokens" in text
    described = json.loads(linnet("info", small, "--json").stdout)
    assert described["family"] == "llama" and len(described["blocks"]) == 2
    assert described["state_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, channels, f32
    narrow = json.loads(linnet("info", small, "--json", "--weights", "q8").stdout)
    assert narrow["attention"] == "bf16" and narrow["state_bytes_per_token"] == 2 * 2 * 2 * 16 * 2


def test_python_gives_what_the_command_gives(small, tmp_path):
    from linnet import runtime

    model = runtime.load(small)
    assert model.info() == json.loads(linnet("info", small, "--json").stdout)
    narrow = runtime.load(small, weights="f32", attention="bf16")
    assert narrow.info()["attention"] == "bf16"
    assert narrow.info()["state_bytes_per_token"] * 2 == model.info()["state_bytes_per_token"]
    with pytest.raises(ValueError, match="attention is 'q8', expected f32 or bf16"):
        runtime.load(small, attention="q8")

    text = "the linnet is a small finch of the open country " * 20
    (tmp_path / "text").write_text(text)
    told = json.loads(linnet("eval", small, "--text", tmp_path / "text", "--length", 64, "--stride", 32, "--json").stdout)["text"]
    score = model.evaluate(text, length=64, stride=32)
    assert {key: score[key] for key in ("tokens", "scored", "windows", "perplexity")} == {key: told[key] for key in ("tokens", "scored", "windows", "perplexity")}
    told = json.loads(linnet("eval", small, "--recall", "--length", 256, "--trials", 2, "--json").stdout)["recall"]
    assert model.recall(256, trials=2) == {each["task"]: each["right"] for each in told}

    whole = model.generate("the", tokens=60)
    assert whole == json.loads(linnet("generate", small, "--prompt", "the", "--tokens", 60, "--json").stdout)["text"]
    for stop in (whole[10:13], whole[20:21], "nothing of this"):
        words = ["generate", small, "--prompt", "the", "--tokens", 60, "--json", "--stop", stop]
        assert model.generate("the", tokens=60, stop=[stop]) == json.loads(linnet(*words).stdout)["text"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["generate"], "generate: which model?"),
        (["generate", "nowhere/model", "--prompt", "x"], "nowhere/model: there is no such file or folder"),
        (["generate", "SMALL"], "the prompt is empty"),
        (["generate", "SMALL", "a text"], "generate: what is 'a text'? expected one MODEL"),
        (["generate", "SMALL", "--prompt", "the " * 700], "more than the model's context of 600"),
        (["generate", "SMALL", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "SMALL", "--prompt", "x", "--weights", "q3"], "weights is 'q3', expected f32, bf16, q8 or q4"),
        (["generate", "SMALL", "--prompt", "x", "--attention", "q8"], "attention is 'q8', expected f32 or bf16"),
        (["generate", "SMALL", "--chat", "--prompt", "x"], "the model has no chat template"),
        (["eval", "SMALL"], "eval: which text?"),
        (["eval", "SMALL", "--text", "nowhere"], "nowhere"),
        (["eval", "SMALL", "--text", "TEXT", "--length", "9999"], "length is 9999, expected 2 to the model's context, 600"),
        (["embed", "SMALL", "a text"], "is no encoder"),
        (["info", "nowhere.gguf"], "there is no such file or folder"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, small, tmp_path):
    text = tmp_path / "text"
    text.write_text("the linnet " * 10)
    run = linnet(*[small if word == "SMALL" else text if word == "TEXT" else word for word in words], code=2, text="")
    assert sentence in run.stderr and run.stderr.count("\n") == 1 and run.stdout == ""


def test_truncated_files_are_refused(small, tmp_path):
    folder = tmp_path / "cut"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((small / name).read_bytes())
    whole = (small / "model.safetensors").read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        assert "model.safetensors" in linnet("generate", folder, "--prompt", "x", code=2).stderr


def test_a_cut_gguf_file_is_refused(tmp_path):
    whole = need(SMOLLM2).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 30, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "cut.gguf" in linnet("generate", path, "--prompt", "x", code=2).stderr


def test_smollm2_answers(tmp_path):
    words = ["--chat", "--tokens", 40, "--weights", "f32"]
    assert "Paris" in linnet("generate", need(SMOLLM2), *words, "--prompt", "What is the capital of France?").stdout
    assert "2 + 2" in linnet("generate", SMOLLM2, *words, text="Name three colours.\nWhat is 2+2?\n").stdout


def test_smollm2_perplexity():
    words = ["eval", need(SMOLLM2), "--text", need(WIKITEXT), "--tokens", 4096, "--length", 4096, "--weights", "f32", "--json"]
    assert abs(json.loads(linnet(*words).stdout)["text"]["perplexity"] / 17.84 - 1) < 1e-3


def test_memory_is_weights_and_states_and_100_mb():
    """The peak of a run with a long prompt, and of loading, in every kind of weights."""
    prompt = need(WIKITEXT).read_text()[:16000]
    for words in ([], ["--weights", "bf16"], ["--weights", "q8"]):
        held = json.loads(linnet("info", need(SMOLLM2), "--json", *words).stdout)["weight_bytes"]
        run = subprocess.run([sys.executable, "-c", PEAK, LINNET, "generate", SMOLLM2, "--tokens", "4", "--json", *words],
                             input=prompt, capture_output=True, text=True, timeout=300, check=True)  # fmt: skip
        result = json.loads(run.stdout)
        assert result["prompt_tokens"] > 3000
        assert int(run.stderr.splitlines()[-1]) * 1024 < held + result["state_bytes"] + 100 * 2**20


def test_minilm_finds_what_is_alike():
    run = linnet("embed", need(MINILM), "a small bird", "a little finch", "the stock market fell", "--similarity")
    rows = [[float(x) for x in line.split()] for line in run.stdout.splitlines()]
    assert abs(rows[0][0] - 1) < 1e-3 and rows[0][1] > 0.5 > 0.3 > rows[0][2]


def test_bench_of_a_model(small):
    words = ["bench", small, "--quick", "--json", "--case", "prefill 32", "--case", "decode 16"]
    prefill, decode = json.loads(linnet(*words, "--peers", "--python", sys.executable).stdout)["cases"]
    assert (prefill["work"], prefill["tokens"], decode["work"], decode["tokens"]) == ("prefill", 32, "decode", 16)
    for case in prefill, decode:
        assert case["tokens_per_second"] > 0 and case["state_bytes"] > 0
        assert [peer["name"].split()[0] for peer in case["peers"]] == ["transformers"]
        assert case["peers"][0]["ratio"] == pytest.approx(case["peers"][0]["median"] / case["median"])


def test_bench_of_a_model_has_rows_of_linear_layers(small):
    rows = linnet("bench", small, "--quick", "--markdown").stdout.splitlines()
    works = [row.split(" | ")[0].strip("| ") for row in rows if row.startswith("| ")]
    linear = [f"linear layers: decode after {tokens}" for tokens in (400, 100000)]
    assert works == ["work", "prefill of 512", "decode after 400", *linear]  # 5,500 are more than the context
    assert "the same after 400" in rows[[row.startswith("| " + linear[1]) for row in rows].index(True)]


def test_bench_of_a_model_names_missing_peers():
    words = ["bench", need(SMOLLM2), "--quick", "--json", "--case", "prefill 16", "--peers", "--python", sys.executable]
    result = json.loads(linnet(*words).stdout)
    for package in "llama_cpp", "xllamacpp":
        told = any(note.startswith(package + " is missing: ") and "pip install" in note for note in result["notes"])
        assert told == (importlib.util.find_spec(package) is None)


@pytest.mark.parametrize("words, sentence", [
    (["--case", "read 32"], "expected 'prefill N' or 'decode N'"),
    (["--case", "decode 3"], "expected 'prefill N' or 'decode N'"),
    (["--dtype", "f32"], "--dtype is for operators, not for a model"),
])  # fmt: skip
def test_bench_of_a_model_refuses(small, words, sentence):
    assert sentence in linnet("bench", small, *words, code=2).stderr
