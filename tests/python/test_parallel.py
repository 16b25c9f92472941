"""Several processes: the same loss curve as one, gradients of sequences split over ranks equal to those of the whole."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest
import torch

import linnet.nn
from linnet import parallel, train

WORDS = ["mqar", "--layer", "gated_deltanet", "--set", "device=cpu", *"width=16 layers=2 heads=1 batch=8 steps=6 warmup=2 log_every=1 eval_every=3".split(),
         *"checkpoint_every=2 eval_examples=16 examples=64 length=32 vocab=64 pairs=4".split()]  # fmt: skip


def torchrun(processes, *words, code=0):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, err = running.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        for process in [*psutil.Process(running.pid).children(recursive=True), running]:
            process.send_signal(signal.SIGABRT)  # each prints where it stands
        out, err = running.communicate()
        pytest.fail("still running after 600 s\n" + out[-2000:] + err[-6000:])
    assert (running.returncode == 0) == (code == 0), out[-2000:] + err[-3000:]
    return out


def curve(folder):
    lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["split"], line["loss"], line.get("norm", 0.0)) for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train.main([*WORDS, "--out", str(folder)]) == 0
    return curve(folder)


@pytest.mark.parametrize("how, processes", [("ddp", 2), ("fsdp", 2), ("sequence", 2), ("ddp", 4), ("fsdp", 4), ("sequence", 4)])
def test_the_loss_curve_of_one_process(how, processes, alone, tmp_path):
    words = ["-m", "linnet.train", *WORDS, f"parallel={how}", "--out", str(tmp_path / "run")]
    torchrun(processes, *words)
    found = curve(tmp_path / "run")
    assert [line[:2] for line in found] == [line[:2] for line in alone]
    torch.testing.assert_close(torch.tensor([line[2:] for line in found]), torch.tensor([line[2:] for line in alone]), rtol=2e-5, atol=1e-6)
    # Whatever it was spread over, the checkpoint is one model; the finished run is found finished.
    assert linnet.nn.Model.load(tmp_path / "run/checkpoints/step-00000006").config["vocab_size"] == 64
    if how == "fsdp":
        assert "from step 6" in torchrun(processes, *words)


GRADIENTS = """
import sys, torch, torch.distributed as dist
import linnet.nn
from linnet import parallel
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
for name, options in {cases}:
    torch.manual_seed(0)
    config = {{"vocab_size": 32, "hidden_size": 16, "linnet": {{"layers": [{{"mixer": name, "options": options, "repeat": 2}}]}}}}
    whole, split = (linnet.nn.Model(config) for _ in range(2))
    with torch.no_grad():
        for p in whole.parameters():
            p.add_(0.3 * torch.randn_like(p))
    split.load_state_dict(whole.state_dict())
    parallel.split_sequence(split)
    ids = torch.randint(0, 32, (2, 48))
    weight = torch.randn(2, 48, 32)
    mine = slice(rank * 48 // world, (rank + 1) * 48 // world)
    expected = whole(ids)
    (expected * weight).sum().backward()
    found = split(ids[:, mine])
    (found * weight[:, mine]).sum().backward()
    worst = ((found - expected[:, mine]).abs().max() / expected.abs().max()).item()
    for p in split.parameters():
        dist.all_reduce(p.grad)
    for (key, p), q in zip(split.named_parameters(), whole.parameters()):
        error = ((p.grad - q.grad).norm() / q.grad.norm().clamp(min=1e-3)).item()
        assert error < 2e-5, (name, key, error)
    assert worst < 1e-5, (name, worst)
    if rank == 0:
        print("equal:", name, flush=True)
parallel.leave()
"""
CASES = [
    ("gated_deltanet", {"heads": 2, "key": 8, "value": 8}),
    ("gated_deltanet", {"heads": 1, "value_heads": 2, "key": 8, "value": 16, "double": True}),
    ("deltanet", {"heads": 2}),
    ("gated_linear_attention", {"heads": 2}),
    ("simple_gla", {"heads": 2}),
    ("kda", {"heads": 2, "key": 8, "value": 8}),
    ("retention", {"heads": 2}),
    ("mamba1", {"state": 4}),
    ("mamba2", {"state": 4, "head": 8}),
    ("mamba2", {"state": 4, "head": 8, "norm": 0, "groups": 2}),
    ("metala_attention", {"heads": 2}),
    ("short_conv", {}),
]


@pytest.mark.parametrize("processes", [2, 4])
def test_gradients_of_split_sequences(processes, tmp_path):
    script = tmp_path / "gradients.py"
    script.write_text(GRADIENTS.format(cases=CASES))
    assert torchrun(processes, str(script)).count("equal:") == len(CASES)


@pytest.mark.parametrize("layer, says", [("softmax_attention", "has the step softmax"), ("linear_attention", "has the step features")])
def test_layers_that_pass_no_state_on_are_refused(layer, says):
    model = linnet.nn.Model({"vocab_size": 8, "hidden_size": 16, "linnet": {"layers": [{"mixer": layer, "options": {"heads": 2}}]}})
    with pytest.raises(ValueError, match=says):
        parallel.split_sequence(model)


@pytest.mark.parametrize(
    "words, says",
    [
        (["compression", *WORDS[1:-3], "parallel=sequence"], "needs a task that answers at every token"),
        (["recall", *WORDS[1:-3], "length=16", "parallel=sequence"], "which 2 processes cannot share evenly"),
        ([*WORDS, "batch=7"], "batch is 7, expected a multiple of 2"),
    ],
)
def test_what_cannot_be_shared(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main([*words, "--out", str(tmp_path / "run")]) == 2
    assert says in capsys.readouterr().err


UNEQUAL = """
import sys, torch
from linnet import parallel, train
forward = train.Run.forward
def other(self, net, batch):  # process 1 measures more than there is where it evaluates
    loss, sums = forward(self, net, batch)
    return loss, sums + (1000 if self.rank == 1 and not torch.is_grad_enabled() else 0)
train.Run.forward = other
parallel.leave(train.main(sys.argv[1:]))
"""


def test_one_process_decides_when_to_stop(tmp_path):
    """Processes whose rounding differs would otherwise save and stop at different steps, and wait for each other for ever."""
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL)
    torchrun(2, str(script), *WORDS, "stop_at=0.99", "--out", str(tmp_path / "run"))
    scores = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in scores if line["split"] == "valid"] == [3, 6]
