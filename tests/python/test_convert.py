"""linnet.convert on models small enough to be trained here: every mechanism, every stage, resumed after a kill, written and read again."""

import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import linnet
import linnet.runtime

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers is not installed")
pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
QUICK = {"seq": 64, "batch": 4, "tokens": 4 * 64 * 8, "check": 4, "held_out": 4}
OPTIONS = {
    "window": {"window": 8, "sinks": 2},
    "hybrid": {"window": 8, "features": 8},
    "hybrid-exact": {"window": 8, "features": 16, "sinks": 2},
    "distill": {"features": 16},
    "hedgehog": {"features": 16},
    "t2r": {"features": 16},
    "gdn": {},
    "gla": {"window": 8},
    "monarch": {"block": 8, "steps": 1},
    "hierarchical": {"arity": 4},
}
TRAINED = ("hybrid", "hybrid-exact", "distill", "hedgehog", "t2r", "gdn", "gla")
IN_THE_RUNTIME = ("window", "distill", "hybrid", "hybrid-exact", "hedgehog", "t2r", "gdn", "gla")  # of causal models


@pytest.fixture(scope="module")
def ids():
    text = (ROOT / "docs" / "python.md").read_bytes() + (ROOT / "docs" / "layers.md").read_bytes()
    return torch.tensor(list(text))[:12000]


@pytest.fixture(scope="module")
def folder(ids, tmp_path_factory):
    """A llama of two layers, trained on bytes for a few seconds."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, **NO_ENDS)
    model = transformers.LlamaForCausalLM(config)
    optimiser, generator = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(200):
        batch = torch.stack([ids[s : s + 64] for s in torch.randint(0, len(ids) - 64, (8,), generator=generator)])
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    path = tmp_path_factory.mktemp("model") / "llama"
    model.save_pretrained(path)
    return path


def load(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def plan_of(mechanism, layers=2):
    return [{"index": i, "mechanism": mechanism, **OPTIONS.get(mechanism, {})} for i in range(layers)]


@pytest.mark.parametrize("mechanism", OPTIONS)
def test_mechanism(mechanism, folder, ids, tmp_path):
    """The fit lowers the held-out loss; the folder that is written gives the same logits here and in the runtime."""
    out = tmp_path / "out"
    model = linnet.convert(load(folder), ids, plan=plan_of(mechanism), out=out, source=folder, **QUICK)
    report = model.linnet_report
    if mechanism in TRAINED:
        trail = report["facts"]["layers_trail"]
        assert trail[-1][1] < trail[0][1] * (1 - 1e-5), trail
    config = json.loads((out / "config.json").read_text())
    assert [each["mechanism"] for each in config["linnet"]["layers"]] == [mechanism] * 2
    assert {name: config[name] for name in SMALL} == SMALL
    source, written = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    for name, tensor in source.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    assert all(name.startswith(f"linnet.layers.{name.split('.')[2]}.{mechanism}.") for name in set(written) - set(source))
    again = linnet.load_converted(out)
    assert torch.equal(logits(again, ids[None, :100]), logits(model, ids[None, :100]))
    if mechanism in IN_THE_RUNTIME:
        mine = torch.tensor(linnet.runtime.load(out).logits(ids[:100].tolist())).view(100, -1)
        theirs = logits(model, ids[None, :100])[0]
        assert (mine - theirs).abs().max() < 2e-4 * theirs.abs().max()


FAMILIES = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "num_key_value_heads": 2, **NO_ENDS}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SMALL, "num_key_value_heads": 2, "head_dim": 16, **NO_ENDS}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, **NO_ENDS}),
    "bert": ("BertModel", "BertConfig", SMALL),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SMALL, "image_size": 32, "patch_size": 4}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, tmp_path):
    """Chosen by measured damage under a budget, fitted end to end, written and read again."""
    model, config, options = FAMILIES[family]
    torch.manual_seed(1)
    model = getattr(transformers, model)(getattr(transformers, config)(**{k: v for k, v in options.items() if k != "vocab_size" or family != "vit"}))
    text = {"bert": torch.randint(0, 256, (24, 64)), "vit": torch.randn(24, 3, 32, 32)}.get(family, torch.randint(0, 256, (6000,)))
    out = tmp_path / "out"
    linnet.convert(model, text, budget=0.6, length=256, finetune="kl", finetune_tokens=4 * 64 * 2, out=out, error_tokens=4 * 64 * 2, **QUICK)
    assert model.linnet_report["facts"]["cost"] <= 0.6
    again = linnet.load_converted(out)
    given = {"pixel_values": text[:2]} if family == "vit" else {"input_ids": text[:2] if family == "bert" else text[None, :50]}
    with torch.no_grad():
        assert torch.equal(again(**given)[0], model(**given)[0])


def test_budget_one(folder, ids, tmp_path):
    before = logits(load(folder), ids[None, :100])
    linnet.convert(load(folder), ids, budget=1, out=tmp_path / "out", source=folder, finetune="kl", finetune_tokens=2000, **QUICK)
    again = linnet.load_converted(tmp_path / "out")
    attended = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation=again.config._attn_implementation)
    assert torch.equal(logits(again, ids[None, :100]), logits(attended, ids[None, :100]))
    assert (logits(again, ids[None, :100]) - before).abs().max() < 1e-5 * before.abs().max()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"], load(folder).model.norm.weight)


@pytest.mark.parametrize("mechanism", ["window", "hybrid", "hybrid-exact"])
def test_window_that_covers_all(mechanism, folder, ids):
    before = logits(load(folder), ids[None, :60])
    plan = [{"index": i, "mechanism": mechanism, "window": 64} for i in range(2)]
    model = linnet.convert(load(folder), ids, plan=plan, **{**QUICK, "tokens": 0})
    assert (logits(model, ids[None, :60]) - before).abs().max() < 1e-5 * before.abs().max()


@pytest.mark.parametrize("mechanism", ["softmax", "window", "hybrid", "hybrid-exact", "distill", "gla"])
def test_plain_torch_where_a_device_has_no_kernels(mechanism, monkeypatch):
    """What runs on a GPU in the place of operators without CUDA kernels gives the same."""
    from linnet.convert import mixers

    torch.manual_seed(0)
    shape = mixers.Shape(64, 4, 2, 16, 16, 0.25, True)
    mixer = mixers.make(shape, mechanism, **OPTIONS.get(mechanism, {}))
    q, k, v = torch.randn(2, 50, 4, 16), torch.randn(2, 50, 2, 16), torch.randn(2, 50, 2, 16)
    more = {"q": q, "k": k, "v": v, "q_raw": q, "k_raw": k}
    mixer.initialise(more, torch.Generator().manual_seed(0))
    expected = mixer(q, k, v, more)
    monkeypatch.setattr(mixers, "native", lambda operator, tensor: False)
    assert (mixer(q, k, v, more) - expected).abs().max() < 1e-5


def test_teacher_in_plain_torch(folder, ids, monkeypatch):
    from linnet.convert import attention, mixers

    model = load(folder)
    before = logits(model, ids[None, :60])
    attention.find(model)
    monkeypatch.setattr(mixers, "native", lambda operator, tensor: False)
    assert (logits(model, ids[None, :60]) - before).abs().max() < 1e-5 * before.abs().max()


def test_padding_on_either_side(folder, ids):
    model = linnet.convert(load(folder), ids, plan=plan_of("hybrid"), **{**QUICK, "tokens": 0})
    text = ids[None, :40]
    alone = logits(model, text)[0]
    nothing = torch.zeros(1, 9, dtype=torch.long)
    for batch, mask, part in ((torch.cat([nothing, text], 1), [0] * 9 + [1] * 40, slice(9, None)),
                              (torch.cat([text, nothing], 1), [1] * 40 + [0] * 9, slice(0, 40))):  # fmt: skip
        positions = (torch.tensor([mask]).cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            out = model(input_ids=batch, attention_mask=torch.tensor([mask]), position_ids=positions).logits[0, part]
        assert (out - alone).abs().max() < 1e-4 * alone.abs().max()
    assert logits(model, ids[None, :1]).isfinite().all()


def test_generates_with_and_without_a_cache(folder, ids, tmp_path):
    """Windows have a cache in transformers; the others run the whole text again, or say that they have none."""
    texts = {}
    for mechanism in ("window", "hybrid"):
        linnet.convert(load(folder), ids, plan=plan_of(mechanism), out=tmp_path / mechanism, source=folder, **{**QUICK, "tokens": 0})
        model = linnet.load_converted(tmp_path / mechanism)
        for cache in (True, False):
            if mechanism == "hybrid" and cache:
                with pytest.raises(NotImplementedError, match="has no cache"):
                    model.generate(ids[None, :20], max_new_tokens=4, do_sample=False, use_cache=True)
                continue
            texts[mechanism, cache] = model.generate(ids[None, :20], max_new_tokens=20, do_sample=False, use_cache=cache)
    assert torch.equal(texts["window", True], texts["window", False])
    assert texts["hybrid", False].shape == (1, 40)


WINDOWS = {"one": [{"window": 5, "sinks": 2}] * 2, "by head": [{"windows": [3, 7], "sinks": 2}, {"windows": [6, 4], "sinks": 0}],
           "all keys": [{"windows": [0, 4], "sinks": 1}, {"window": 1, "sinks": 0}]}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_caches_of_windows_are_bounded(name, folder, ids, tmp_path):
    """The same tokens as without a cache: greedy, beams and several texts; what is kept does not grow beyond the windows."""
    plan = [{"index": i, "mechanism": "window", **options} for i, options in enumerate(WINDOWS[name])]
    linnet.convert(load(folder), ids, plan=plan, out=tmp_path / "windows", source=folder, **{**QUICK, "tokens": 0})
    model = linnet.load_converted(tmp_path / "windows")
    assert model.config.use_cache
    batch = torch.stack([ids[:20], ids[20:40]])
    for options in ({}, {"num_beams": 3}):
        texts = [model.generate(batch, max_new_tokens=30, do_sample=False, use_cache=cache, eos_token_id=None, pad_token_id=0, **options)
                 for cache in (True, False)]  # fmt: skip
        assert torch.equal(*texts), options
    with torch.no_grad():
        whole, cache = model(input_ids=ids[None, :50], use_cache=False).logits, None
        for part in (ids[:17], *ids[17:30].split(1), ids[30:50]):
            out = model(input_ids=part[None], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
    assert (out.logits - whole[:, 30:]).abs().max() < 1e-4 * whole.abs().max()
    assert cache.get_seq_length() == 50
    for layer, options in zip(cache.layers, WINDOWS[name], strict=False):
        windows = options.get("windows") or [options["window"]]
        assert [keys.shape[-2] for keys, _ in layer.parts] == [min(50, w + options["sinks"] - 1) if w else 50 for w in windows]
    left = torch.nn.functional.pad(batch, (3, 0))
    mask = (torch.arange(23) >= 3).long().expand(2, -1)
    with pytest.raises(NotImplementedError, match="know no padding"):
        model.generate(left, attention_mask=mask, max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0)
    padded = model.generate(left, attention_mask=mask, max_new_tokens=5, do_sample=False, use_cache=False, eos_token_id=None, pad_token_id=0)
    plain = model.generate(batch, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(padded[:, 3:], plain)


def test_end_to_end_lowers_the_kl(folder, ids):
    for finetune in ("kl", "lora"):
        model = linnet.convert(load(folder), ids, plan=[{"index": 1, "mechanism": "window", "window": 2, "sinks": 0}],
                               finetune=finetune, finetune_tokens=4 * 64 * 30, mixer_rate=3e-4, other_rate=3e-4, **QUICK)  # fmt: skip
        report = model.linnet_report
        assert report["after"]["kl"] < 0.98 * report["layerwise"]["kl"], (finetune, report["after"], report["layerwise"])
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not any("parametrizations" in name for name, _ in model.named_parameters())


def test_divergence_and_its_gradient():
    from linnet.convert.fit import Divergence

    generator = torch.Generator().manual_seed(0)
    mine, theirs = (5 * torch.randn(7, 11, generator=generator, dtype=torch.float32) for _ in range(2))
    results = []
    for own in (True, False):
        x = mine.clone().requires_grad_()
        p, q = theirs.log_softmax(-1), x.log_softmax(-1)
        loss = Divergence.apply(x, theirs) if own else (p.exp() * (p - q)).sum()
        (loss * 0.3).backward()
        results.append((loss.detach(), x.grad))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-5) and torch.allclose(results[0][1], results[1][1], atol=1e-6)


def test_stages_end_with_their_time(folder, ids):
    """More tokens than anybody has time for, and every fourth step in sequences of four times the length."""
    plan = [{"index": 1, "mechanism": "gdn", "window": 8, "sinks": 2}]
    model = linnet.convert(load(folder), ids, plan=plan, finetune="kl", finetune_tokens=10**9, long=256, fit_seconds=0.5,
                           finetune_seconds=1.0, warmup=0.1, **dict(QUICK, tokens=10**9))  # fmt: skip
    steps = {stage: sum(name == stage for name, _, _ in model.linnet_report["history"]) for stage in ("layers", "kl")}
    assert all(0 < count < 10**5 for count in steps.values()), steps


def test_long_sequences_are_whole_pieces_of_the_text(folder, ids):
    from linnet.convert import Fit, Settings, attention, data

    model = load(folder)
    blocks = ids[: 12 * 64].view(12, 64)
    fit = Fit(model, attention.find(model), {}, Settings(batch=4, long=256))
    order = data.Order(len(blocks), 0)
    for step in range(8):
        batch = fit.longer(blocks, order, step)
        assert batch.shape == ((1, 256) if step % 4 == 3 else (4, 64))
        for row in batch:
            assert (ids[: 12 * 64].unfold(0, len(row), 64) == row).all(1).any()


def test_gates_beside_a_window_begin_nearer_to_the_teacher_than_the_window():
    from linnet.convert import mixers

    generator = torch.Generator().manual_seed(1)
    shape = mixers.Shape(32, 4, 2, 16, 16, 0.25, True)
    mixer = mixers.make(shape, "gdn", window=16, sinks=2)
    made = {"q": 4, "k": 2, "v": 2}
    sample = {name: torch.randn(2, 128, heads, 16, generator=generator) for name, heads in made.items()}
    sample["x"] = torch.randn(2, 128, 32, generator=generator)
    sample["out"] = mixers.softmax(sample["q"], sample["k"], sample["v"], shape)
    with torch.no_grad():
        mixer.initialise(sample, generator)
        given = sample["q"], sample["k"], sample["v"]
        errors = [float((y - sample["out"]).square().sum()) for y in (mixer(*given, sample), mixers.softmax(*given, shape, 16, 2))]
    assert errors[0] < 0.8 * errors[1]


def test_knapsack_is_optimal():
    from linnet.convert.choose import OverBudget, knapsack

    generator = random.Random(0)
    for _ in range(20):
        costs = [[generator.randint(1, 50) for _ in range(3)] for _ in range(4)]
        damages = [[generator.random() for _ in range(3)] for _ in range(4)]
        budget = sum(min(layer) for layer in costs) + generator.randint(4, 60)
        picks = knapsack(costs, damages, budget)
        assert sum(costs[i][p] for i, p in enumerate(picks)) <= budget
        least = min(sum(damages[i][p] for i, p in enumerate(choice)) for choice in itertools.product(range(3), repeat=4)
                    if sum(costs[i][p] for i, p in enumerate(choice)) <= budget - 4)  # fmt: skip
        assert sum(damages[i][p] for i, p in enumerate(picks)) <= least + 1e-12
    with pytest.raises(OverBudget, match="cheapest choice costs 2.000 times"):
        knapsack([[2.0]], [[0.0]], 1.0)


# ---- the command: resumed after a kill, several processes, the work folder


def command(*words, processes=1):
    start = [sys.executable, "-m"] if processes == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}",
                                                           "--standalone", "-m"]  # fmt: skip
    folder = pathlib.Path(linnet.__file__).parents[1]
    return [*start, "linnet.convert", *map(str, words)], {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(*words, processes=1):
    line, environment = command(*words, processes=processes)
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def job(folder, ids, tmp_path_factory):
    """The words of a conversion with all stages, and what it gives when nobody disturbs it."""
    place = tmp_path_factory.mktemp("job")
    ids.numpy().astype("uint16").tofile(place / "ids")
    (place / "plan.json").write_text(json.dumps({"layers": [*plan_of("hybrid", 1), {**plan_of("gdn")[1]}]}))
    words = ["run", folder, "--ids", place / "ids", "--plan", place / "plan.json", "--seq", 64, "--batch", 4, "--tokens", 4 * 64 * 6,
             "--error-tokens", 4 * 64 * 4, "--finetune", "kl", "--finetune-tokens", 4 * 64 * 4, "--check", 3, "--save-seconds", 0,
             "--device", "cpu"]  # fmt: skip
    done = run(*words, "--out", place / "out")
    assert done.returncode == 0, done.stderr
    return words, load_file(place / "out" / "model.safetensors"), json.loads(done.stdout)


@pytest.mark.parametrize(("stage", "step"), [("layers", 2), ("errors", 1), ("kl", 2)])
def test_goes_on_after_a_kill(stage, step, job, tmp_path):
    words, expected, _ = job
    words = [*words, "--out", tmp_path / "out", "--work", tmp_path / "work"]
    line, environment = command(*words)
    process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(30000):
        for name in ("checkpoint", "checkpoint.old"):
            try:
                facts = json.loads((tmp_path / "work" / name / "state.json").read_text())
            except (OSError, ValueError):
                continue
            if facts["stage"] == stage and facts["step"] >= step:
                process.send_signal(signal.SIGKILL)
        if process.poll() is not None:
            break
        time.sleep(0.002)
    assert process.wait() == -signal.SIGKILL
    again = run(*words)
    assert again.returncode == 0, again.stderr
    assert "going on with" in again.stderr
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_two_processes_give_the_same_losses(job, tmp_path):
    words, _, report = job
    done = run(*words, "--out", tmp_path / "out", processes=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["after"]["kl"] == pytest.approx(report["after"]["kl"], rel=1e-3)
    assert json.loads(done.stdout)["layerwise"]["kl"] == pytest.approx(report["layerwise"]["kl"], rel=1e-3)


def test_work_folder(folder, ids, tmp_path):
    """What `linnet convert` leaves for the fit, and what it gets back."""
    work = tmp_path / "out.work"
    work.mkdir()
    parts = {"calibration": ids[:1000], "plan": ids[1000:2000], "fit": ids[2000:8000], "evaluation": ids[8000:9000]}
    save_file({name: y.int() for name, y in parts.items()}, work / "tokens.safetensors")
    (work / "state.json").write_text(json.dumps({"format": 1, "model": str(folder)}))
    layers = [{"index": 0, "mechanism": "softmax", "cost": 1, "damage": 0}, {**plan_of("hybrid")[1], "cost": 0.1, "damage": 0.1}]
    (work / "plan.json").write_text(json.dumps({"format": 1, "layers": layers}))
    words = ["fit", "--work", work, "--device", "cpu", "--tokens", 2000, "--seq", 64, "--batch", 4]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    names = {f"linnet.layers.1.hybrid.{n}" for n in ("feature_map_q.weight", "feature_map_k.weight", "window_factor")}
    assert set(load_file(work / "fit.safetensors")) == names
    (work / "plan.json").unlink()
    done = run(*words)
    assert done.returncode == 2 and "has no plan.json" in done.stderr


# ---- bad input


def test_sentences(folder, ids, tmp_path):
    def fails(sentence, kind=ValueError, model=None, text=ids, **options):
        with pytest.raises(kind, match=sentence):
            linnet.convert(model or load(folder), text, **{**QUICK, **options})

    fails("budget is 0, expected more than 0", budget=0)
    fails("no mechanism 'magic'", plan=[{"index": 0, "mechanism": "magic"}])
    fails("hybrid has no option 'wings'", plan=[{"index": 0, "mechanism": "hybrid", "wings": 2}])
    fails("window is 0, expected a whole number of at least 1", plan=[{"index": 0, "mechanism": "window", "window": 0}])
    fails("the plan has layer 7, the model has attention in 0, 1", plan=[{"index": 7, "mechanism": "window"}])
    fails("there is no option 'speed'", TypeError, speed=3)
    fails("tokens are too few", text=ids[:100])
    fails("has no tokenizer.json", FileNotFoundError, text="some text", tokenizer=None)
    fails("is no UTF-8 text: byte 1", text=_latin(tmp_path), tokenizer=Letters())
    fails("the budget cannot be met", budget=1e-6, mechanisms=("window",))
    broken = load(folder)
    broken.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    fails(r"layer 1 \(model.layers.1.self_attn\) gives NaN", model=broken, plan=plan_of("hybrid"))
    linnet.convert(load(folder), ids, plan=plan_of("hybrid"), work=tmp_path / "work", **QUICK)
    fails(r"other settings \(seed\)", plan=plan_of("hybrid"), work=tmp_path / "work", seed=1)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=2, **NO_ENDS))
    fails("does not know the attention of a bloom model", model=bloom)


def test_text_of_a_folder(folder, tmp_path):
    """A path and the tokenizer of a folder; the plan of a command, whose windows of 0 say that there is none."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))},
                                                         merges=[]))  # fmt: skip
    letters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.save(str(tmp_path / "tokenizer.json"))
    plan = [{"index": 0, "mechanism": "distill", "features": 8, "window": 0, "sinks": 0, "cost": 0.1, "damage": 0.2}]
    model = linnet.convert(load(folder), ROOT / "docs" / "python.md", tokenizer=tmp_path, plan=plan, **{**QUICK, "tokens": 0})
    assert model.config.linnet["layers"][0] == {"index": 0, "mechanism": "distill", "features": 8}


class Letters:
    def encode(self, text, add_special_tokens=True):
        return list(text.encode())


def _latin(folder):
    (folder / "latin.txt").write_bytes(b"x\xe9")
    return folder / "latin.txt"


def test_checkpoints_that_do_not_fit(folder, ids, tmp_path):
    out = tmp_path / "out"
    linnet.convert(load(folder), ids, plan=plan_of("hybrid"), out=out, source=folder, **{**QUICK, "tokens": 0})
    with pytest.raises(FileExistsError, match="is there already"):
        linnet.convert(load(folder), ids, plan=plan_of("hybrid"), out=out, source=folder, **{**QUICK, "tokens": 0})
    tensors, config = load_file(out / "model.safetensors"), (out / "config.json").read_text()
    name = "linnet.layers.0.hybrid.window_factor"
    for change, sentence in (
        ({name: None}, "window_factor is missing"),
        ({name: torch.zeros(3)}, r"window_factor is \[3\], expected \[4\]"),
        ({"linnet.layers.0.hybrid.more": torch.zeros(3)}, "hybrid.more belongs to no layer"),
    ):
        changed = {key: y for key, y in {**tensors, **change}.items() if y is not None}
        save_file(changed, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=sentence):
            linnet.load_converted(out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(config.replace('"format": 1', '"format": 9'))
    with pytest.raises(ValueError, match="linnet.format is 9, expected 1"):
        linnet.load_converted(out)
    with pytest.raises(ValueError, match="is no converted model"):
        linnet.load_converted(folder)


def test_hybrid_exact_beside_its_vector():
    """out_hybrid of distill-balance from the balanced rows of the same file, in f64."""
    path = ROOT / "tests" / "vectors" / "distill-balance.safetensors"
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        window = int(file.metadata()["window"])
    y = load_file(path)
    eta = y["q"].shape[-1] ** -0.5
    query_logw = ((y["q"] - y["q_mean"]) * y["k_mean"]).sum(-1) * eta
    out = linnet.distill_hybrid(y["q"], y["k"], y["v"], y["q_balanced"], y["k_balanced"], query_logw, y["key_logw"], y["z"], y["alpha"], window=window)
    assert (out - y["out_hybrid"]).abs().max() < 1e-10 * y["out_hybrid"].abs().max()
