"""linnet.train: every task learns, runs repeat, a killed run goes on with the same numbers, damage gets a sentence."""

import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import linnet.nn
from linnet import _checkpoints, train
from linnet._train_graph import Graphs
from linnet._train_settings import read_settings
from linnet._train_tasks import KINDS, Task, draw_icl, expression_tree

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve()
TINY = "width=16 layers=1 heads=1 batch=8 steps=6 warmup=2 log_every=1 eval_every=3 checkpoint_every=2 eval_examples=16".split()
MQAR = ["mqar", "--layer", "linear_attention", "--set", *TINY, "examples=64", "length=16", "vocab=32", "pairs=2"]


def metrics(folder, without=("seconds",)):
    lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in without} for line in lines]


def weights(folder):
    newest = sorted((pathlib.Path(folder) / "checkpoints").glob("step-*"))[-1]
    return (newest / "model.safetensors").read_bytes()


def losses(folder):
    return [line["loss"] for line in metrics(folder) if line["split"] == "train"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"the linnet sings because it has a song. " * 200)
    return path


TASKS = {
    "mqar": "length=16 vocab=32 pairs=2",
    "recall": "length=16",
    "noisy_recall": "length=16",
    "fuzzy_recall": "length=32",
    "memorisation": "length=16 vocab=32",
    "compression": "length=16",
    "selective_copy": "length=40 items=6",
    "listops": "max_length=30",
    "regbench": "words=3 max_word=8",
    "pathfinder": "",
    "images": "path={images}",
    "text": "path={text} length=16",
    "documents": "first={text} second={images} length=16",
    "icl": "dims=3 prompts=6",
    "channel_max": "channels=3 length=6",
    "forecast": "rows=300 channels=2 lookback=20 horizon=5",
}


@pytest.mark.parametrize("task", KINDS)
def test_every_task_trains(task, tmp_path, text_file, capsys):
    images = tmp_path / "images.csv"
    images.write_text("\n".join(",".join(str((7 * i * j) % 17) for j in range(64)) + f",{i % 10}" for i in range(80)) + "\n")
    options = TASKS[task].format(text=text_file, images=images).split()
    code = train.main([task, "--layer", "linear_attention", "--out", str(tmp_path / "run"), "--json", "--set", *TINY, "examples=48", *options])
    out = capsys.readouterr()
    assert code == 0, out.err
    result = json.loads(out.out)
    assert result["steps"] == 6 and result["test"][result["score"]] == result["test"][result["score"]]
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["split"] == "valid"] == [3, 6]
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_images_by_patches(tmp_path):
    """Squares of 4 pixels of a 8 x 8 image, row by row; the grid of a layer that needs one is given as its option."""
    images = tmp_path / "images.csv"
    images.write_text("\n".join(",".join(str(4 * (j // 32) + j % 8 // 4) for j in range(64)) + f",{i % 10}" for i in range(80)) + "\n")
    inputs = Task("images", {"path": str(images), "patch": "4"}, {}, examples=8, eval_examples=8, seed=0).split("train")[0].inputs
    assert inputs.shape == (8, 4, 16) and (inputs[0, :, 0] == inputs[0, :, 15]).all() and len(inputs[0, :, 0].unique()) == 4
    words = ["images", "--layer", "inline_attention", "--out", str(tmp_path / "run"), "--set", *TINY, "examples=48", f"path={images}", "patch=4"]
    assert train.main([*words, "causal=0", "layer.height=2", "layer.width=2", "positions=4"]) == 0
    checkpoint = torch.load(sorted((tmp_path / "run/checkpoints").glob("step-*"))[-1] / "trainer.pt", weights_only=True)
    assert checkpoint["head"]["value.weight"].shape == (16, 16)


@pytest.mark.parametrize(
    ("ids", "parent"),
    [
        ([2, 7, 8, 6, 1], [5, 5, 5, 5, 6, 6, -1]),  # [MIN 0 1 ] end
        ([3, 7, 2, 8, 9, 6, 6, 1], [9, 9, 8, 8, 8, 8, 9, 10, 9, 10, -1]),  # [MAX 0 [MIN 1 2 ] ] end
        ([7], [-1]),
    ],
)
def test_trees_of_expressions(ids, parent):
    assert expression_tree(ids) == parent


def test_trees_are_seen(tmp_path):
    """The layer gives what the operator gives for each sequence on its own tree, and another number of trees is refused."""
    torch.manual_seed(0)
    layer = linnet.nn.HierarchicalAttention(hidden=8, heads=2, causal=False, tie="block", dtype=torch.float64)
    x, mask = torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor([[True] * 5, [True] * 4 + [False]])
    parents = [[5, 5, 6, 6, 7, 7, 7, -1], [4, 4, 5, 5, 5, -1]]
    with linnet.nn.trees(parents):
        got = layer(x, mask=mask)
    for row, (count, parent) in enumerate(zip((5, 4), parents)):
        q, k, v = (F.linear(x[row : row + 1, :count], part.weight).unflatten(-1, (2, -1)) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        read = linnet.hierarchical(q, k, v, parent=torch.tensor(parent), tie="block", include_self=True)
        torch.testing.assert_close(got[row, :count], F.linear(read.flatten(-2), layer.o_proj.weight)[0])
    assert not torch.allclose(got, layer(x, mask=mask))
    with linnet.nn.trees(parents[:1]), pytest.raises(ValueError, match="there are 1 trees, expected 2"):
        layer(x, mask=mask)
    words = ["listops", "--layer", "hierarchical_attention", "--out", str(tmp_path / "run"), "--set", *TINY, "examples=48", "max_length=30"]
    assert train.main([*words, "causal=0", "layer.tie=block", "task.tree=1"]) == 0


def test_channel_max_wants_each_channels_largest_number():
    part = Task("channel_max", {"channels": 3, "length": 5}, {}, examples=100, eval_examples=4, seed=0).split("train")[0]
    torch.testing.assert_close(part.targets, part.inputs[..., :3].amax(1))
    torch.testing.assert_close(part.inputs.norm(dim=-1).median(), torch.tensor(12.0).sqrt())


def test_splits_have_no_sequence_in_common():
    task = Task("mqar", {"length": 16, "vocab": 64, "pairs": 2}, {}, examples=500, eval_examples=500, seed=3)
    rows = [{tuple(row) for row in task.split(split)[0].inputs.tolist()} for split in ("train", "valid", "test")]
    assert not rows[0] & rows[1] and not rows[0] & rows[2] and not rows[1] & rows[2]


@pytest.mark.parametrize(
    ("formula", "design", "words"),
    [
        ("full", {}, ()),
        ("full", {"spectrum": 0.5}, ("spectrum=0.5",)),
        ("drift_attention", {"drift": 0.8}, ("drift=0.8",)),
        ("drift_h3", {"drift": 0.8}, ("drift=0.8",)),
        ("retrieval", {"retrieval": 0.4}, ("alpha=0.4",)),
        ("aligned", {"alignment": 0.4}, ("alpha=0.4",)),
    ],
)
def test_prompts_are_those_of_the_theory(formula, design, words):
    """The best step g = sum_c W_c x_c (X^T (omega y))_c, fitted to drawn prompts, has the loss of the closed form."""
    d, n, noise = 3, 6, 0.2
    inputs, y = draw_icl(torch.Generator().manual_seed(1), 400_000, d, n, noise, **design)
    omega = torch.ones(n, dtype=torch.float64)
    if formula == "drift_h3":  # omega = G^-1 kappa
        rho, place = design["drift"], torch.arange(n, dtype=torch.float64)
        gram = rho ** (place[:, None] - place).abs() + (d + 1 + noise**2) * torch.eye(n, dtype=torch.float64)
        omega = torch.linalg.solve(gram, rho ** (n - place))
    inputs, y = inputs.double(), y.double()
    read = inputs[:, -1, :d] * ((omega * inputs[:, :n, d])[..., None] * inputs[:, :n, :d]).sum(1)  # [N, d]: W is diagonal in all of these designs
    fit = torch.linalg.lstsq(read, y).solution
    measured = float((y - read @ fit).square().mean())
    known = subprocess.run([BUILD / "linnet", "analyze", "icl", formula, f"d={d}", f"n={n}", f"noise={noise**2}", *words, "--json"], capture_output=True, text=True, check=True, timeout=600)
    assert measured == pytest.approx(json.loads(known.stdout)["losses"][formula][0], rel=0.02)


def test_in_context_regression_is_learned(tmp_path):
    """One layer reads the prompt: far below the variance of y, which is dims."""
    words = ["icl", "--layer", "linear_attention", "--out", str(tmp_path / "run"), "--set", "dims=2", "prompts=16", "width=32", "layers=2", "heads=1",
             "steps=200", "eval_examples=200", "lr=1e-2", "warmup=10", "eval_every=100", "mlp=glu"]  # fmt: skip
    assert train.main(words) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test"]["mse"] < 1.0


def test_it_learns(tmp_path):
    words = ["memorisation", "--layer", "gated_deltanet", "--out", str(tmp_path / "run"), "--set", "vocab=16", "length=8", "width=32", "layers=1",
             "steps=150", "batch=32", "examples=256", "eval_examples=64", "lr=1e-2", "warmup=10", "eval_every=50"]  # fmt: skip
    assert train.main(words) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test"]["accuracy"] > 0.95


def test_a_run_repeats_bit_for_bit(tmp_path):
    for name in "ab":
        assert train.main([*MQAR, "--out", str(tmp_path / name)]) == 0
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") and weights(tmp_path / "a") == weights(tmp_path / "b")
    assert train.main([*MQAR, "seed=1", "--out", str(tmp_path / "c")]) == 0
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_accumulation_changes_rounding_alone(tmp_path):
    for name, pieces in (("a", 1), ("b", 4)):
        assert train.main([*MQAR, f"accumulate={pieces}", "--out", str(tmp_path / name)]) == 0
    torch.testing.assert_close(losses(tmp_path / "b"), losses(tmp_path / "a"), rtol=1e-5, atol=1e-6)


def test_bf16_has_f32_weights(tmp_path):
    assert train.main([*MQAR, "dtype=bf16", "--out", str(tmp_path / "a")]) == 0
    assert train.main([*MQAR, "--out", str(tmp_path / "b")]) == 0
    assert losses(tmp_path / "a") != losses(tmp_path / "b")
    torch.testing.assert_close(losses(tmp_path / "a"), losses(tmp_path / "b"), rtol=0.02, atol=0.02)
    assert next(linnet.nn.Model.load(tmp_path / "a/checkpoints/step-00000006").parameters()).dtype == torch.float32


def test_a_mixture_and_other_lengths_where_it_is_evaluated(tmp_path):
    words = [*MQAR, "length=16,32", "pairs=2,4", "vocab=96", "examples=64,32", "eval.length=16,32,64", "eval.pairs=2,4,8", "--out", str(tmp_path / "a")]
    assert train.main(words) == 0
    parts = [line for line in metrics(tmp_path / "a") if line["split"] == "valid"][-1]["parts"]
    assert [part["part"] for part in parts] == ["length=16 pairs=2", "length=32 pairs=4", "length=64 pairs=8"]


def test_options_of_one_layer_of_a_hybrid():
    words = ["short_conv.taps=5", "taps=2", "width=16", "init=fan_in"]
    settings = read_settings(train.Settings(), types.SimpleNamespace(task="mqar", layer="short_conv,deltanet", set=[words], config=None, full=False))
    run = train.Run(settings, "unused")
    first, second = (block.self_attn for block in run.plain.model.layers)
    assert first.conv.weight.shape[1] == 5 and second.q_conv1d.weight.shape[1] == 2
    assert second.q_proj.weight.abs().max() <= 0.25 and second.q_proj.weight.std() > 0.1  # 1 / sqrt(16), not a deviation of 0.02


def test_the_best_weights_are_tested(tmp_path):
    """A rate that ruins what was learned: the last weights are worse than the best, and the test is of the best, also after a restart."""
    words = ["memorisation", "--layer", "linear_attention", "--out", str(tmp_path / "run"), "--set", "vocab=16", "length=8", "width=32", "layers=1",
             "steps=120", "batch=32", "examples=256", "eval_examples=64", "lr=1e-2", "warmup=60", "eval_every=20", "final_lr=100", "clip=0", "best=1"]  # fmt: skip
    assert train.main(words) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    scores = {line["step"]: line["accuracy"] for line in metrics(tmp_path / "run") if line["split"] == "valid"}
    assert max(scores.values()) > scores[120] + 0.1 and result["test"]["accuracy"] > scores[120] + 0.1
    assert train.main(words) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test"] == result["test"]


def test_steps_by_tables_are_the_steps(tmp_path):
    """What is recorded on a GPU, run as it is: rows, rates and measures go through tables, and the numbers are those of the plain loop."""
    words = [*MQAR[4:], "examples=64", "checkpoint_every=0"]
    runs = [train.Run(read_settings(train.Settings(), types.SimpleNamespace(task="mqar", layer="deltanet", set=[words], config=None, full=False)),
                      tmp_path / name) for name in "ab"]  # fmt: skip
    runs[1].graphs = Graphs(runs[1])
    runs[1].graphs.refused = "no GPU here"
    expected = []
    for found in runs[0].steps_until(6):
        expected.append(found)
        runs[0].step += 1
    torch.testing.assert_close(list(runs[1].graphs.steps(0, 6)), expected)


def test_a_toml_file_says_the_same(tmp_path):
    pytest.importorskip("tomllib")
    lines = ['task = "mqar"', 'layer = "linear_attention"']
    for word in MQAR[4:]:
        name, value = word.split("=")
        lines.append(f"{name} = {value}")
    (tmp_path / "run.toml").write_text("\n".join(lines))
    assert train.main(["--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "a")]) == 0
    assert train.main([*MQAR, "--out", str(tmp_path / "b")]) == 0
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_a_checkpoint_is_a_model(tmp_path):
    assert train.main([*MQAR, "--out", str(tmp_path / "a")]) == 0
    newest = tmp_path / "a/checkpoints/step-00000006"
    model = linnet.nn.Model.load(newest)
    ids = torch.arange(16)[None]
    from linnet import runtime

    logits = model(ids)[0]
    theirs = torch.as_tensor(runtime.load(str(newest)).logits(ids[0].tolist())).reshape(logits.shape)
    torch.testing.assert_close(theirs, logits.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chess"], "there is no task 'chess'; there are mqar, recall"),
        (["mqr"], "there is no task 'mqr'; did you mean 'mqar'?"),
        ([], "which task? There are mqar"),
        (["mqar", "--layer", "softmax"], "there is no layer 'softmax'; did you mean 'softmax_attention'?"),
        (["mqar", "--set", "witdh=3"], "there is no setting 'witdh'; did you mean 'width'?"),
        (["mqar", "--set", "width"], "--set width: expected name=value"),
        (["mqar", "--set", "width=a"], "width is 'a', expected a whole number"),
        (["mqar", "--set", "batch=0"], "batch is 0, expected at least 1"),
        (["mqar", "--set", "dtype=f8"], "dtype is 'f8', expected f32, bf16"),
        (["mqar", "--set", "tie=maybe"], "tie is 'maybe', expected 0 or 1"),
        (["mqar", "--set", "length=33"], "mqar: length is 33, expected an even number"),
        (["mqar", "--set", "length=64,128", "pairs=2,3,4"], "length has 2 values, but the mixture has 3 parts"),
        (["mqar", "--layer", "short_conv,deltanet", "--set", "deltanet.tap=2"], "deltanet has no option 'tap'; did you mean 'taps'?"),
        (["mqar", "--set", "init=ones"], "init is 'ones', expected page, fan_in"),
        (["mqar", "--set", "layer.hedas=2"], "has no option 'hedas'; did you mean 'heads'?"),
        (["mqar", "--layer", "softmax_attention", "--set", "width=10", "heads=3"], "heads"),
        (["icl", "--set", "dims=0"], "icl: dims is 0, expected 1 to 10000"),
        (["icl", "--set", "drift=1.5"], "icl: drift is 1.5, expected 0 to 1"),
        (["icl", "--set", "retrieval=-1"], "icl: retrieval is -1, expected 0 to 1"),
        (["channel_max", "--set", "channels=a"], "channel_max: channels is 'a', expected a number"),
        (["mqar", "--set", "examples=4"], "batch is 64, but the task has 4 training sequences"),
        (["mqar", "--set", "accumulate=3", "examples=100"], "batch is 64, expected a multiple of 3"),
        (["text", "--set", "path=/nonexistent"], "/nonexistent"),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml"),
    ],
)
def test_bad_settings_get_a_sentence(words, says, tmp_path, capsys):
    assert train.main([*words, *(["--out", str(tmp_path / "run")])]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_loss_that_is_no_number_any_more(tmp_path, capsys):
    assert train.main([*MQAR, "lr=1e30", "clip=0", "--out", str(tmp_path / "a")]) == 1
    assert "try a smaller lr" in capsys.readouterr().err


def test_another_run_in_the_folder(tmp_path, capsys):
    assert train.main([*MQAR, "--out", str(tmp_path / "a")]) == 0
    before = weights(tmp_path / "a")
    assert train.main([*MQAR, "width=32", "--out", str(tmp_path / "a")]) == 2
    assert "holds another run: width is 16 there and 32 here" in capsys.readouterr().err
    (tmp_path / "a" / "settings.json").write_text("[]")
    assert train.main([*MQAR, "--out", str(tmp_path / "a")]) == 2
    assert "is not what linnet train wrote" in capsys.readouterr().err
    assert weights(tmp_path / "a") == before


class Killed(BaseException):
    pass


def crash_at(monkeypatch, call):
    """The process ends at the call-th step of writing a checkpoint, and cleans nothing up."""
    count = 0

    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal count
            count += 1
            if count >= call:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(_checkpoints, "write_tensors", counted(_checkpoints.write_tensors))
    monkeypatch.setattr(_checkpoints.torch, "save", counted(torch.save))
    monkeypatch.setattr(_checkpoints, "_to_disk", counted(_checkpoints._to_disk))
    monkeypatch.setattr(_checkpoints.shutil, "rmtree", counted(shutil.rmtree))
    monkeypatch.setattr(pathlib.Path, "rename", counted(pathlib.Path.rename))


@pytest.mark.parametrize("call", [1, 2, 3, 6, 7, 8, 9, 10, 12, 15, 18, 19, 20, 27])
def test_a_crash_at_any_step_of_a_checkpoint(call, tmp_path, monkeypatch):
    assert train.main([*MQAR, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patched, pytest.raises(Killed):
        crash_at(patched, call)
        train.main([*MQAR, "--out", str(tmp_path / "run")])
    assert train.main([*MQAR, "--out", str(tmp_path / "run")]) == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole") and weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert not list((tmp_path / "run/checkpoints").glob("unfinished-*"))


KILLED = """
import os, random, signal, sys, time
from linnet import train

kills, lines, words = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
chance = random.Random(5)
for _ in range(kills):
    seen, child = os.path.getsize(lines) if os.path.exists(lines) else 0, os.fork()  # torch is loaded once, and has no threads yet
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(train.main(words))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not os.path.exists(lines) or os.path.getsize(lines) <= seen + 1):
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            sys.exit("a run ended by itself")
        time.sleep(0.001)
    time.sleep(chance.random() * 0.1)
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        sys.exit("a run ended by itself")
"""


def test_killed_again_and_again(tmp_path):
    """kill -9 at random moments; LINNET_KILLS=200 for the long version."""
    kills = int(os.environ.get("LINNET_KILLS", 5))
    words = [*MQAR, f"steps={60 + 25 * kills}", "checkpoint_every=3", "eval_every=20"]
    assert train.main([*words, "--out", str(tmp_path / "whole")]) == 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    lines, run = tmp_path / "run" / "metrics.jsonl", ["--out", str(tmp_path / "run")]
    subprocess.run([sys.executable, "-c", KILLED, str(kills), str(lines), *words, *run], env=environment, check=True, timeout=60 + 130 * kills)
    assert train.main([*words, *run]) == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole") and weights(tmp_path / "run") == weights(tmp_path / "whole")


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def changed(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("model.safetensors", cut, "model.safetensors has"),
        ("model.safetensors", changed, "model.safetensors has changed"),
        ("trainer.pt", cut, "trainer.pt has"),
        ("trainer.pt", pathlib.Path.unlink, "trainer.pt is missing"),
        ("checkpoint.json", cut, "this is no checkpoint of linnet train"),
        ("checkpoint.json", pathlib.Path.unlink, "this is no checkpoint of linnet train"),
        ("checkpoint.json", lambda path: path.write_text('{"format": "other"}'), "checkpoint.json says format 'other'"),
    ],
)
def test_damaged_checkpoints_are_refused(file, damage, says, tmp_path, capsys):
    words = [*MQAR, "eval_every=4", "stop_at=0"]
    assert train.main([*words, "--out", str(tmp_path / "a")]) == 0
    newest = sorted((tmp_path / "a" / "checkpoints").glob("step-*"))[-1]
    damage(newest / file)
    kept = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert train.main([*words, "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err
    assert says in said and "nothing was changed" in said and "remove" in said
    assert {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()} == kept


def test_a_full_disk(tmp_path, capsys):
    """A limit on the size of files stands for a disk without room: the checkpoints before stay whole."""
    assert train.main([*MQAR, "--out", str(tmp_path / "whole")]) == 0
    original = _checkpoints.Checkpoints.save
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(self, step, *rest):
        if step < 4:
            return original(self, step, *rest)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        try:
            return original(self, step, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    _checkpoints.Checkpoints.save = full
    try:
        assert train.main([*MQAR, "--out", str(tmp_path / "a")]) == 3
    finally:
        _checkpoints.Checkpoints.save = original
    assert "cannot be written: File too large" in capsys.readouterr().err
    assert not list((tmp_path / "a/checkpoints").glob("unfinished-*")) and _checkpoints.Checkpoints(tmp_path / "a").steps()[-1] < 4
    assert train.main([*MQAR, "--out", str(tmp_path / "a")]) == 0
    assert metrics(tmp_path / "a") == metrics(tmp_path / "whole")
