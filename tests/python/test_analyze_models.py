"""linnet analyze on models of every layer: which system a head is, that the model's own kernel agrees with it, and sentences."""

import json
import subprocess

import pytest
import torch
import transformers
from runtime_cases import BUILD, save_tokenizer

import linnet.nn
from linnet._files import read_tensors, write_tensors

HIDDEN = 16


def analyze(folder, *words, code=0):
    done = subprocess.run([BUILD / "linnet", "analyze", str(folder), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def make(folder, mixer, **options):
    """Two blocks of one layer, no tokenizer: measured on random tokens. Projections are large, so that heads give more than noise."""
    torch.manual_seed(0)
    model = linnet.nn.Model({"model_type": "linnet", "vocab_size": 61, "hidden_size": HIDDEN, "tie_word_embeddings": True,
                             "linnet": {"layers": [{"mixer": mixer, "options": options, "intermediate_size": 24, "repeat": 2}]}})  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight") and parameter.dim() == 2:
                parameter.normal_(std=0.5)
    model.save(str(folder))
    return folder


SYSTEMS = [
    ("linear_attention", {"heads": 2}, "linear"),
    ("normalised_attention", {"heads": 2}, "linear_sum"),
    ("retention", {"heads": 2}, "retention"),
    ("simple_gla", {"heads": 2}, "retention"),
    ("gated_linear_attention", {"heads": 2}, "gla"),
    ("deltanet", {"heads": 2}, "delta"),
    ("gated_deltanet", {"heads": 2, "key": 4, "value": 8}, "gated_delta"),
    ("kda", {"heads": 2, "key": 4, "value": 8}, "kda"),
    ("mamba1", {"state": 4}, "s6"),
    ("mamba2", {"head": 8, "state": 4}, "ssd"),
    ("metala_attention", {"heads": 2}, "metala"),
    ("metala_attention", {"heads": 2, "aug": "linear"}, "metala"),
    ("metala_attention", {"heads": 2, "aug": "none"}, "metala"),
    ("zeros_attention", {"heads": 2}, "zeros"),
    ("zeros_attention", {"heads": 2, "zeroth": 1}, "zeros"),
    *(("free_energy_mixer", {"heads": 2, "prior": prior}, "softmax" if prior == "softmax" else f"fem_{prior}") for prior in ("softmax", "linear", "gated", "aft", "ssm")),
    ("free_energy_mixer", {"heads": 2, "prior": "gated", "lse": 0}, "fem_gated"),
    ("free_energy_mixer", {"heads": 2, "prior": "linear", "gate": 0}, "fem_linear"),
    ("h3_mixer", {"head_dim": 1, "shift": 4, "modes": 3}, "h3"),
    ("h3_mixer", {"head_dim": 4, "shift": 4, "modes": 3, "disc": "zoh"}, "h3"),
]


@pytest.mark.parametrize(("mixer", "options", "system"), SYSTEMS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())))
def test_heads_as_systems(mixer, options, system, tmp_path):
    found = json.loads(analyze(make(tmp_path, mixer, **options), "--tokens", "96", "--json").stdout)
    assert not found["left_out"] and {head["mixer"] for head in found["recurrent"]} == {system}
    assert {head["layer"] for head in found["recurrent"]} == {0, 1}
    assert all(head["kernel_error"] < 1e-4 for head in found["recurrent"]), found["recurrent"]
    one = json.loads(analyze(tmp_path, "--tokens", "48", "--layer", "1", "--head", "0", "--json").stdout)["mixers"]
    assert [report["mixer"] for report in one] == [system] and one[0]["ok"]


@pytest.mark.parametrize("options", [{}, *({"position": position} for position in ("G1", "G2", "G3", "G4", "G5")), {"position": "G1", "granularity": "headwise"},
                                     {"position": "G1", "act": "silu", "mode": "add"}], ids=lambda x: "-".join(x.values()) or "plain")  # fmt: skip
def test_gates_of_softmax_heads(options, tmp_path):
    """A gate stands beside the system; the model's kernel is compared behind it."""
    folder = make(tmp_path, "softmax_attention", heads=2, **options)
    assert len(json.loads(analyze(folder, "--tokens", "96", "--json").stdout)["heads"]) == 4
    said = analyze(folder, "--tokens", "48", "--layer", "1", "--head", "1").stdout.splitlines()[-1]
    assert "is softmax on 48 tokens" in said and float(said.split()[-4]) < 1e-4, said


WITHOUT = [("short_conv", {}, "layer 0, short_conv: none of its steps is a system that this tool knows")]


@pytest.mark.parametrize(("mixer", "options", "says"), WITHOUT, ids=lambda x: x if isinstance(x, str) and " " not in x else None)
def test_layers_without_a_system(mixer, options, says, tmp_path):
    """A model of them alone has no attention to look into, and the sentence has the reason."""
    folder = make(tmp_path, mixer, **options)
    said = analyze(folder, "--tokens", "96", code=2).stderr
    assert "has no attention to look into" in said and says in said
    assert says in analyze(folder, "--tokens", "48", "--layer", "0", code=2).stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--layer", "2"), "the model has layers 0 to 1, but --layer is 2"),
        (("--layer", "0", "--head", "2"), "layer 0, zeros_attention: it has heads 0 to 1, but --head is 2"),
        (("--layer", "0", "s5"), "dsf: s5: it needs a tensor a_real"),
    ],
)
def test_bad_input(words, says, tmp_path):
    assert says in analyze(make(tmp_path, "zeros_attention", heads=2), *words, code=2).stderr


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 128}
FAMILIES = {  # class, configuration, whether attention is causal, measures that there are not
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300, n_positions=128), True, ()),
    "bert": ("BertModel", transformers.BertConfig(**SIZES), False, ()),
    "gemma2": ("Gemma2ForCausalLM", transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=16), True, ("kl_features_64", "kl_hierarchical")),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8), True, ()),
    "gpt_neox": ("GPTNeoXForCausalLM", transformers.GPTNeoXConfig(**SIZES), True, ()),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    name, config, causal, missing = FAMILIES[family]
    torch.manual_seed(0)
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text("the linnet is a small finch of the open country " * 40)
    words = ("--text", str(tmp_path / "text.txt"), "--tokens", "100", "--windows", "8,32")
    found = json.loads(analyze(tmp_path, *words, "--json").stdout)
    assert found["causal"] == causal and len(found["heads"]) == 8 and found["tokens"] == 100
    for head in found["heads"]:
        assert 0 < head["entropy_ratio"] <= 1 + 1e-9 and head["dof"] > 0
        assert all(head[measure] is None for measure in missing)
    if not causal:
        assert "its attention is not causal: no system runs from token to token" in analyze(tmp_path, *words[:2], "--layer", "0", code=2).stderr
    if family in ("gpt2", "bert"):  # a table of positions ends
        assert "128" in analyze(tmp_path, *words[:2], "--tokens", "129", code=2).stderr


@pytest.mark.parametrize(("mixer", "where"), [("gated_deltanet", "layer 1: its output is not finite"), ("softmax_attention", "layer 1")])
def test_broken_activations_are_named(mixer, where, tmp_path):
    folder = make(tmp_path, mixer, heads=2)
    tensors, metadata = read_tensors(str(folder / "model.safetensors")), {}
    name = next(name for name in tensors if name.startswith("layers.1.") and name.endswith("v_proj.weight"))
    tensors[name] = tensors[name].clone().fill_(3e38)  # finite, but not what comes of it
    write_tensors(str(folder / "model.safetensors"), tensors, metadata)
    said = analyze(folder, "--tokens", "96", code=2).stderr
    assert where in said and "not finite" in said, said
