"""linnet.nn.Model beside the runtime: the same folder, the same logits, the same greedy tokens."""

import json
import subprocess

import numpy
import pytest
import torch
from runtime_cases import BUILD, runtime, save_tokenizer
from test_nn import options_of

import linnet.nn
from linnet._files import read_tensors, write_tensors
from linnet._records import LAYERS, record

VOCABULARY = 61


def config_of(blocks, hidden=16, tied=False, **own):
    return {"model_type": "linnet", "vocab_size": VOCABULARY, "hidden_size": hidden, "tie_word_embeddings": tied,
            "linnet": {**own, "layers": blocks}}  # fmt: skip


def block_of(name, **entry):
    options = {key: value for key, value in options_of(name).items() if key != "hidden"}
    return {"mixer": name, "options": options, "intermediate_size": 24, **entry}


DECODING = [name for name in sorted(LAYERS) if record(name, options_of(name))["decode"]]
CASES = {name: config_of([block_of(name, repeat=2)]) for name in DECODING}
CASES |= {
    "hybrid": config_of([block_of("gated_deltanet", repeat=2), block_of("softmax_attention", mlp="plain", bias=True), block_of("mamba2", mlp="none")]),
    "window": config_of([block_of("softmax_attention") | {"options": {"heads": 4, "kv_heads": 2, "window": [5, 0], "qk_norm": "rms"}}], tied=True),
    "post": config_of([block_of("retention", act="relu", mlp="plain")], order="post", norm="layer", norm_eps=1e-5),
    "parallel": config_of([block_of("gated_linear_attention", act="gelu_new")], order="parallel", norm="layer", tied=True),
    "positions": config_of([block_of("softmax_attention") | {"options": {"heads": 2, "rope": "none"}}], positions=96, final_norm=False),
    "kda-bounded": config_of([block_of("kda") | {"options": {"heads": 2, "key": 4, "value": 8, "lower": -5}}]),
}  # fmt: skip


def model_of(name, dtype=torch.float32):
    """Weights that make everything matter: the initial ones are nearly zero."""
    torch.manual_seed(0)
    model = linnet.nn.Model(CASES[name], dtype=dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 and "ssm" not in key and "shift" not in key:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5 * 1.2)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def difference(got, want):
    got, want = torch.as_tensor(numpy.array(got)).double().reshape(-1), want.detach().double().reshape(-1)
    return ((got - want).abs().max() / want.abs().max()).item()


def ids_of(count=33, rows=1):
    return torch.randint(0, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", CASES)
def test_the_runtime_runs_a_saved_model(name, tmp_path):
    model, ids = model_of(name), ids_of()
    model.save(tmp_path)
    again = linnet.nn.Model.load(tmp_path)
    with torch.no_grad():
        expected = model(ids)
        assert torch.equal(again(ids), expected)
    ours = runtime.load(tmp_path, weights="f32")
    assert difference(ours.logits(ids[0].tolist()), expected) < 1e-4
    session, tokens = ours.start(), ids[0].tolist()
    logits = session.prefill(tokens)
    for _ in range(12):
        tokens.append(int(numpy.argmax(logits)))
        logits = session.decode(tokens[-1])
    greedy = ids
    with torch.no_grad():
        for _ in range(12):
            greedy = torch.cat([greedy, model(greedy)[:, -1].argmax(-1, keepdim=True)], 1)
    assert greedy[0].tolist() == tokens


def test_linnet_generate_gives_the_same_greedy_text(tmp_path):
    torch.manual_seed(2)
    model = linnet.nn.Model(CASES["hybrid"] | {"vocab_size": 300})
    model.save(tmp_path)
    save_tokenizer(tmp_path, 300)
    words = ["generate", tmp_path, "--prompt", "the linnet", "--tokens", "20", "--weights", "f32", "--json"]
    run = subprocess.run([BUILD / "linnet", *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    tokens = torch.tensor([runtime.load(tmp_path).tokenizer.encode("the linnet")])
    prompt = tokens.shape[1]
    with torch.no_grad():
        for _ in range(20):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    assert json.loads(run.stdout)["tokens"] == tokens[0, prompt:].tolist()


def test_bfloat16_and_shards(tmp_path):
    model = model_of("hybrid", torch.bfloat16)
    model.save(tmp_path)
    again = linnet.nn.Model.load(tmp_path)
    assert {each.dtype for each in again.parameters()} == {torch.bfloat16}
    tensors = read_tensors(tmp_path / "model.safetensors")
    parts = {"a.safetensors": list(tensors)[:5], "b.safetensors": list(tensors)[5:]}
    for file, names in parts.items():
        write_tensors(tmp_path / file, {name: tensors[name] for name in names})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: file for file, names in parts.items() for name in names}}))  # fmt: skip
    again = linnet.nn.Model.load(tmp_path, dtype=torch.float32)
    assert torch.equal(again.norm.weight, model.norm.weight.float())


def test_a_model_trains_and_starts_again():
    model, ids = linnet.nn.Model(CASES["hybrid"]), ids_of(24, 4)
    first = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(each.grad is not None for each in model.parameters())
    torch.manual_seed(1)
    model.reset_parameters()
    torch.manual_seed(1)
    again = linnet.nn.Model(CASES["hybrid"])
    assert first.keys() == again.state_dict().keys()
    for name, each in model.named_parameters():  # same rules; the order of draws differs
        assert abs(each.std() - again.state_dict()[name].std()) < 0.5 * each.std() + 1e-6, name


BROKEN = {
    "mixer": (config_of([{"mixer": "gated_deltane"}]), "mixer is 'gated_deltane', which is no layer; did you mean 'gated_deltanet'"),
    "order": (config_of([block_of("kda")], order="sandwich"), "order is 'sandwich', expected pre, post, parallel"),
    "norm": (config_of([block_of("kda")], norm="batch"), "norm is 'batch', expected rms, layer"),
    "mlp": (config_of([block_of("kda", mlp="moe")]), "mlp is 'moe', expected glu, plain, none"),
    "act": (config_of([block_of("kda", act="snake")]), "act is 'snake', expected silu"),
    "key": (config_of([block_of("kda", inner=3)]), "a block has 'inner', expected mixer, options"),
    "layers": (config_of([]), "linnet.layers is missing"),
    "vocabulary": (config_of([block_of("kda")]) | {"vocab_size": 0}, "vocab_size is 0, expected a number from 1 on"),
    "type": (config_of([block_of("kda")]) | {"model_type": "llama"}, "model_type is 'llama', expected 'linnet'"),
    "option": (config_of([{"mixer": "kda", "options": {"heads": 0}}]), "heads is 0"),
    "file": ("/absent/config.json", "No such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_config_gets_a_sentence(name):
    config, sentence = BROKEN[name]
    with pytest.raises(ValueError, match=sentence):
        linnet.nn.Model(config)


def test_broken_files_get_a_sentence(tmp_path):
    model = model_of("window")
    model.save(tmp_path)
    path, tensors = tmp_path / "model.safetensors", dict(model.state_dict())
    broken = {
        "has no norm.weight": {name: each for name, each in tensors.items() if name != "norm.weight"},
        "has norm.extra, which the model has not": {**tensors, "norm.extra": torch.ones(1)},
        r"norm.weight has shape \[3\], expected \[16\]": {**tensors, "norm.weight": torch.ones(3)},
    }
    for sentence, each in broken.items():
        write_tensors(path, each)
        with pytest.raises(ValueError, match=sentence):
            linnet.nn.Model.load(tmp_path)
    for data in (b"", b"\xff" * 32, (10).to_bytes(8, "little") + b"not json.."):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is no safetensors file"):
            linnet.nn.Model.load(tmp_path)
    assert not list(tmp_path.glob("*.partial"))
