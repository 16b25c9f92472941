"""linnet.results: every row of every comparison runs, the table has what the runs measured, finished runs are not repeated."""

import dataclasses
import json
import pathlib

import pytest
import torch

from linnet import _comparison, results
from linnet._comparisons import COMPARISONS

TINY = "steps=2 eval_every=2 checkpoint_every=2 log_every=1 batch=8 eval_examples=8 examples=64 width=16 heads=2 layers=2 warmup=1 stop_at=0".split()
SHORT = "length=16,32 pairs=2,4 vocab=64 examples=64,32 eval.length=16,32 eval.pairs=2,4".split()
MORE = {"images": "width=96 heads=3 layers=1".split(), "mqar": "vocab=64".split(), "zoology": SHORT, "metala": SHORT,
        "text": "length=32".split(), "gated": "length=32".split(), "length": ["layers=1"]}  # fmt: skip


ROWS = {"length": ["deltanet-2048"], "text": ["softmax_attention", "zeros_attention", "kda,kda,kda,softmax_attention"]}  # the others are much the same


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Small files in the places of the real ones."""
    files = {
        "mnist/train-images-idx3-ubyte.gz": b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (64, 28, 28)) + bytes(i % 251 for i in range(64 * 784)),
        "mnist/train-labels-idx1-ubyte.gz": b"\0\0\x08\x01" + (64).to_bytes(4, "big") + bytes(i % 10 for i in range(64)),
        "enwik8/enwik8": b"the linnet sings because it has a song. " * 10000,
    }
    files |= {name.replace("train", "t10k"): text for name, text in files.items() if "mnist" in name}
    rows = "\n".join(",".join([f"2016-07-01 {i}", *(f"{(i * (j + 3)) % 17:.1f}" for j in range(7))]) for i in range(17420))
    files["ett/ETTh1.csv"] = ("date,a,b,c,d,e,f,g\n" + rows + "\n").encode()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(text)
    comparisons = {}
    for name, each in COMPARISONS.items():
        moved = {column: (task, {key: str(value).replace(str(_comparison.DATA), str(tmp_path)) for key, value in words.items()})
                 for column, (task, words) in each.columns.items() if column in list(each.columns)[:1]}  # fmt: skip
        comparisons[name] = dataclasses.replace(each, columns=moved, data=tuple(file for file in each.data if "ETTm1" not in file))
    monkeypatch.setattr(results, "COMPARISONS", comparisons)
    monkeypatch.setattr(results, "DATA", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_row_runs(name, data, capsys):
    arms = ROWS.get(name, list(COMPARISONS[name].arms))
    words = [name, "--only", *arms, "--seeds", "1", "--quiet", "--out", str(data / "runs"), "--set", *TINY, *MORE.get(name, [])]
    assert results.main(words) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines[2:]}
    assert set(arms) <= set(rows) and "diverged" not in "".join(lines)
    if name == "gated":
        assert "largest activation" in lines[0]
    found = list((data / "runs" / name).rglob("result.json"))
    rates = len(COMPARISONS[name].rates)
    assert len(found) == len(arms) * len(results.COMPARISONS[name].columns) * (rates + 1 if rates > 1 else 1)


def test_runs_beside_each_other_give_the_same(data, capsys):
    """Two processes with two runs each, and one after the other: the same table, and the file of all results."""
    words = ["channel_max", "--only", "linear_attention", "gated_deltanet", "--seeds", "1", "--quiet", "--set", *TINY, "threads=1"]
    assert results.main([*words, "--out", str(data / "one")]) == 0
    alone = capsys.readouterr().out
    assert results.main([*words, "--out", str(data / "two"), "--jobs", "2", "--beside", "2", "--json", str(data / "all.json")]) == 0
    cells = [[line.split("|")[:-2] for line in text.splitlines()] for text in (alone, capsys.readouterr().out)]
    assert cells[0] == cells[1]
    rows = json.loads((data / "all.json").read_text())
    assert len(rows) == 6 and all(row["result"]["test"]["mse"] > 0 for row in rows)


def test_a_deadline_leaves_a_table(data, capsys):
    words = ["channel_max", "--only", "linear_attention", "--quiet", "--deadline", "0", "--out", str(data / "runs"), "--set", *TINY]
    assert results.main(words) == 0
    assert "| linear_attention | not run |" in capsys.readouterr().out


def test_rates_are_chosen_and_seeds_averaged(data, capsys):
    words = ["channel_max", "--only", "linear_attention", "--seeds", "3", "--out", str(data / "runs"), "--set", *TINY]
    assert results.main([*words, "--quiet"]) == 0
    row = capsys.readouterr().out.splitlines()[2].split("|")
    folders = {path.parent.name: json.loads(path.read_text()) for path in (data / "runs").rglob("result.json")}
    best = min((folders[f"lr-{rate:g}-seed-0"]["best"], rate) for rate in (3e-3, 1e-2))[1]
    values = [folders[f"lr-{best:g}-seed-{seed}"]["test"]["mse"] for seed in (1, 2, 3)]  # not the seed that chose the rate
    assert len(folders) == 5 and row[5].strip() == f"{best:g}"
    assert row[4].strip() == f"{sum(values) / 3:.3f} ({min(values):.3f} to {max(values):.3f})"
    before = {path: path.stat().st_mtime_ns for path in (data / "runs").rglob("metrics.jsonl")}
    assert results.main([*words, "--quiet"]) == 0  # finished: read, not trained again
    assert {path: path.stat().st_mtime_ns for path in (data / "runs").rglob("metrics.jsonl")} == before


def test_a_row_that_diverges_is_told(data, capsys, monkeypatch):
    arms = {"wild": ("linear_attention", {"clip": 0, "lr": 1e30})}
    one = dataclasses.replace(results.COMPARISONS["channel_max"], arms=arms, rates=(1e30,))
    monkeypatch.setattr(results, "COMPARISONS", {"channel_max": one})
    assert results.main(["channel_max", "--quiet", "--out", str(data / "runs"), "--set", *TINY[1:], "steps=20"]) == 0
    assert "| wild | diverged |" in capsys.readouterr().out


def test_nlinear_is_the_best_matrix():
    """A series that repeats is foretold without error; the last value repeated is not."""
    rows = _comparison.nlinear({"one": ("forecast", {"lookback": 24, "horizon": 12})})
    assert rows["NLinear, least squares"][0] < rows["the last value repeated"][0]


def test_attention_sinks_of_a_known_model(tmp_path):
    """Keys and queries of zero attend evenly: a token at place t gives the first one 1 / (t + 1)."""
    from linnet import train

    path = tmp_path / "text"
    path.write_bytes(b"the linnet sings because it has a song. " * 100)
    words = {"path": path, "length": 16, "layers": 1, "width": 16, "heads": 2, "eval_examples": 8, "batch": 8}
    run = train.Run(results.settings_of(("text", words), ("softmax_attention", {"rope": "none"}), 1e-3, 0, False), tmp_path / "run")
    with torch.no_grad():
        run.plain.model.layers[0].self_attn.q_proj.weight.zero_()
    got = _comparison.attention_sinks(run)
    assert got["attention on the first token"] == pytest.approx(sum(1 / t for t in range(2, 17)) / 15, rel=1e-5)
    used = run.plain.model.embed_tokens.weight.detach()[list(set(path.read_bytes()))]
    assert got["largest activation"] == pytest.approx(float(used.abs().max()), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["mqr"], 2, "there is no comparison 'mqr'; did you mean 'mqar'?"),
        (["mqar", "--only", "deltanett"], 2, "mqar has no row 'deltanett'; did you mean 'deltanet'?"),
        (["mad", "--columns", "chess"], 2, "mad has no task 'chess'"),
        (["mqar", "--set", "witdh=3"], 2, "there is no setting 'witdh'; did you mean 'width'?"),
        (["images"], 3, "tools/fetch.py mnist brings it"),
    ],
)
def test_bad_input(words, code, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "DATA", tmp_path)
    assert results.main([*words, "--out", str(tmp_path / "runs")]) == code
    assert says in capsys.readouterr().err


def test_the_list_names_every_row(capsys):
    assert results.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text and all(arm in text for arm in each.arms) for name, each in COMPARISONS.items())


def test_full_keeps_the_rows_options():
    small = results.settings_of(*[(COMPARISONS["mqar"].columns["accuracy"]), COMPARISONS["mqar"].arms["deltanet-8-heads"]], 1e-3, 2, False)
    full = results.settings_of(*[(COMPARISONS["mqar"].columns["accuracy"]), COMPARISONS["mqar"].arms["deltanet-8-heads"]], 1e-3, 2, True)
    assert small.heads == full.heads == 8 and small.task_options["length"] == "32" and full.task_options["length"] == "64,128,256,256,256"
    assert pathlib.Path(results.__file__).exists() and full.seed == 2
