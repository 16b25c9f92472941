"""linnet.train: every task learns, runs repeat, a killed run goes on with the same numbers, damage gets a sentence."""

import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import time

import pytest
import torch

import linnet.nn
from linnet import _checkpoints, train
from linnet._train_tasks import KINDS, Task

ROOT = pathlib.Path(__file__).resolve().parents[2]
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


def test_splits_have_no_sequence_in_common():
    task = Task("mqar", {"length": 16, "vocab": 64, "pairs": 2}, {}, examples=500, eval_examples=500, seed=3)
    rows = [{tuple(row) for row in task.split(split)[0].inputs.tolist()} for split in ("train", "valid", "test")]
    assert not rows[0] & rows[1] and not rows[0] & rows[2] and not rows[1] & rows[2]


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
        (["mqar", "--set", "layer.hedas=2"], "has no option 'hedas'; did you mean 'heads'?"),
        (["mqar", "--layer", "softmax_attention", "--set", "width=10", "heads=3"], "heads"),
        (["icl", "--set", "dims=0"], "icl: dims is 0, expected 1 to 10000"),
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


def test_killed_again_and_again(tmp_path):
    """kill -9 at random moments; LINNET_KILLS=200 for the long version."""
    kills, chance = int(os.environ.get("LINNET_KILLS", 3)), random.Random(5)
    steps = max(60, 8 * kills)
    words = [*MQAR, f"steps={steps}", "checkpoint_every=3", "eval_every=20"]
    assert train.main([*words, "--out", str(tmp_path / "whole")]) == 0
    lines = tmp_path / "run" / "metrics.jsonl"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for _ in range(kills):
        child = subprocess.Popen([sys.executable, "-m", "linnet.train", *words, "--out", str(tmp_path / "run")], env=environment, stdout=subprocess.DEVNULL)
        seen, wanted, deadline = (lines.stat().st_size if lines.exists() else 0), 1, time.monotonic() + 120
        while child.poll() is None and time.monotonic() < deadline and (not lines.exists() or lines.stat().st_size <= seen + wanted):
            time.sleep(0.002)
        time.sleep(chance.random() * 0.1)
        child.kill()
        child.wait()
    assert train.main([*words, "--out", str(tmp_path / "run")]) == 0
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
