"""linnet bench: cases, output, exit codes and sentences. Nothing here looks at how long anything took."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"
TINY = "softmax B=1 Tq=16 Tk=Tq H=2 Hkv=H K=8 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd"
TINY_LINEAR = "linear B=1 T=128 S=T Hq=2 Hk=Hq Hv=Hq K=8 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd"
TINY_DECODE = "linear_decode B=2 T=1 Hq=2 Hk=Hq Hv=Hq K=8 V=K dtype=f32 pass=fwd"
TINY_CACHE = "softmax_decode B=2 T=1 H=2 Hkv=1 K=8 V=K capacity=32 lengths=20 dtype=f32 pass=fwd"


def linnet(*words, code=0, env=None):
    done = subprocess.run([LINNET, *words], capture_output=True, text=True, timeout=300, env={**os.environ, **(env or {})})
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


def test_list_has_every_operator_and_prints_lines_that_stand_for_themselves():
    lines = linnet("bench", "--list").stdout.splitlines()
    operators = {op["name"] for op in json.loads(linnet("list", "--json").stdout)["operators"]}
    assert {line.split()[0] for line in lines} == operators
    assert len(lines) == len(set(lines))
    for line in lines[::7]:
        assert linnet("bench", "--case", line, "--list").stdout.splitlines() == [line]


def test_list_as_json():
    cases = json.loads(linnet("bench", "--list", "--json", "softmax").stdout)["cases"]
    assert [f"{each['operator']} {each['case']}" for each in cases] == linnet("bench", "--list", "softmax").stdout.splitlines()


def test_lines_of_check_and_bench_are_each_others():
    line = "softmax B=2 Tq=9 Tk=9 H=2 Hkv=2 K=8 V=8 causal=1 with=sinks skip=lse dtype=bf16 pass=bwd impl=ref threads=3 strided=1 seed=7"
    listed = linnet("bench", "--list", "--case", line).stdout.strip()
    assert listed == "softmax B=2 Tq=9 Tk=9 H=2 Hkv=2 K=8 V=8 causal=1 with=sinks dtype=bf16 pass=fwd+bwd"
    for line in [listed, TINY_CACHE, TINY.replace("fwd|", ""), "linear B=1 T=8 S=8 Hq=2 Hk=2 Hv=2 K=4 V=4 with=final_state dtype=f32 pass=fwd"]:
        assert "1 passed, 0 failed" in linnet("check", "--case", line.replace("=Tq", "=16")).stdout


@pytest.mark.parametrize("words", [  # the shapes that the project promises a speed for
    "softmax B=1 Tq=4096 Tk=4096 H=8 Hkv=8 K=64 V=64 causal=1 dtype=f32 pass=fwd",
    "softmax B=1 Tq=4096 Tk=4096 H=8 Hkv=8 K=128 V=128 causal=0 dtype=bf16 pass=fwd+bwd",
    "linear B=1 T=8192 S=8192 Hq=8 Hk=8 Hv=8 K=64 V=64 causal=1 dtype=f32 pass=fwd",
    "linear B=1 T=8192 S=8192 Hq=8 Hk=8 Hv=8 K=128 V=128 causal=1 dtype=f32 pass=fwd+bwd",
    "linear_decode B=1 T=1 Hq=32 Hk=32 Hv=32 K=128 V=128 dtype=f32 pass=fwd",
    "linear_decode B=64 T=1 Hq=32 Hk=32 Hv=32 K=128 V=128 dtype=f32 pass=fwd",
])
def test_promised_shapes_are_declared(words):
    assert words in linnet("bench", "--list").stdout.splitlines()


def test_filters():
    assert all("dtype=bf16" in line for line in linnet("bench", "softmax", "--dtype", "bf16", "--list").stdout.splitlines())
    assert all("pass=fwd+bwd" in line for line in linnet("bench", "--pass", "fwd+bwd", "--list").stdout.splitlines())
    mechanism = {line.split()[0] for line in linnet("bench", "linear", "--list").stdout.splitlines()}
    assert mechanism == {"linear", "linear_decode"}


@pytest.mark.parametrize("named, words, measured", [
    (["gla_decode", "delta_decode"], "B=1 T=1 Hq=2 Hk=2 Hv=2 K=8 V=8 dtype=f32", ["gla_decode", "delta_decode"]),
    (["mamba_selective_scan_decode", "mamba"], "B=1 T=1 E=4 K=2 G=1", ["mamba_selective_scan_decode", "mamba_selective_scan"]),
])
def test_a_case_is_measured_for_every_name(named, words, measured):  # a mechanism's name: its first operator
    lines = linnet("bench", *named, "--list", "--case", words).stdout.splitlines()
    assert [line.split()[0] for line in lines] == measured


def test_json_is_complete():
    result = json.loads(linnet("bench", "--quick", "--json", "--threads", "2", "--case", TINY, "--case", TINY_CACHE).stdout)
    assert result["threads"] == 2 and result["machine"]["cpu"] and result["commit"] and len(result["date"]) == 10
    assert [case["operator"] for case in result["cases"]] == ["softmax", "softmax", "softmax_decode"]
    for case in result["cases"]:
        assert 0 < case["seconds"]["min"] <= case["seconds"]["median"] <= case["seconds"]["p90"]
        assert case["flops"] > 0 and case["bytes"] > 0 and case["workspace_bytes"] >= 0
        assert case["fma_ceiling"] > 0 and case["update_ceiling"] > 0 and case["share_of_ceiling"] > 0
        assert case["nearer_ceiling"] in ("fma", "memory") and case["error_case"] == case["case"]
        assert 0 <= case["error"] < 1e-4


def test_a_case_too_long_for_the_reference_says_where_its_error_was_measured():
    line = "softmax B=1 Tq=2048 Tk=Tq H=2 Hkv=H K=64 V=K causal=1 dtype=f32 pass=fwd"
    case, = json.loads(linnet("bench", "--quick", "--json", "--case", line).stdout)["cases"]
    assert "Tq=2048" in case["case"] and "Tq=2048" not in case["error_case"]


def test_table_and_markdown_have_a_row_per_case():
    table = linnet("bench", "--quick", "--case", TINY).stdout
    assert sum(" softmax B=1" in line for line in table.splitlines()) == 2
    assert "of ceiling" in table and "commit" in table
    rows = [line for line in linnet("bench", "--quick", "--markdown", "--case", TINY).stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1


@pytest.mark.parametrize("words, piece", [
    (["sofmax"], "there is no operator 'sofmax'; did you mean 'softmax'?"),
    (["--dtype", "f31"], "--dtype is 'f31', expected f64, f32, bf16 or f16"),
    (["--pass", "back"], "--pass is 'back', expected"),
    (["--threads", "0"], "threads"),
    (["--threads", "1000"], "--threads is '1000', expected a whole number from 1 to"),
    (["--json", "--markdown"], "--json and --markdown are two formats, expected one"),
    (["--list", "--markdown"], "--list prints lines or, with --json, JSON"),
    (["--time", "no"], "time"),
    (["--case", "B=1"], "--case needs the operator"),
    (["--neighbours"], "--neighbours of which operator?"),
    (["--neighbours", "delta", "--peers"], "--neighbours are compared with their own case, not with --peers"),
    (["--neighbours", "delta", "--limit", "0"], "--limit is '0', expected"),
    (["delta", "--limit", "2"], "--limit is the ratio that --neighbours may have"),
    (["softmax", "--case", "B=1 Z=2"], "no letter, option or count of tokens 'Z'"),
    (["softmax", "--case", "B=1 Tq=2"], "does not say H"),
    (["softmax", "--impl", "fast"], "there is no implementation 'fast'"),
    (["softmax_merge", "--dtype", "f64"], "no declared case fits"),
    (["--case", "softmax_decode B=1 T=1 H=1 Hkv=1 K=8 V=8 capacity=4 lengths=4"], "no room for 1 more"),
    (["--lamp"], "lamp"),
])
def test_bad_input_is_told_in_one_sentence(words, piece):
    done = linnet("bench", *words, code=2)
    assert piece in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name, changed", [
    ("linear", ["map=elu1", "map=t2r with w", "normalize=1 allow_signed=1", "causal=0", "with key_mask", "with initial_state", "with final_state", "dtype=bf16",
                "K=V=96", "K=32", "Hk=2 Hv=2", "long", "packed"]),
    ("gated_delta", ["l2_norm=1", "double_beta=1", "other g", "dtype=f16", "Hq=2", "V=64", "one token less", "short, as many tokens"]),
    ("linear_decode", ["B=256", "K=V=256", "with z"]),
    ("causal_conv", ["with bias", "dtype=bf16"]),
])
def test_neighbours_come_from_the_declaration(name, changed):
    lines = linnet("bench", "--neighbours", name, "--list").stdout.splitlines()
    bases = [line for line in lines if not line.startswith(" ")]
    assert sum(line.split()[0] == name for line in bases) == (1 if name.endswith("_decode") else 2)
    listed = {line.split(":")[0].strip() for line in lines if line.startswith(" ")}
    assert set(changed) <= listed, set(changed) - listed
    assert not [line for line in lines if line.startswith(" ") and line.split(": ", 1)[1] in bases]


def test_neighbours_are_sorted_and_limited():
    words = ["bench", "--neighbours", "--time", "0.002", "--case", TINY_DECODE]
    cases = json.loads(linnet(*words, "--json", "--limit", "1000000").stdout)["cases"]
    ratios = [each["ratio"] for each in cases[0]["neighbours"]]
    assert len(ratios) > 10 and ratios == sorted(ratios, reverse=True) and ratios[-1] > 0
    for each in cases[0]["neighbours"]:
        assert each["ratio"] == pytest.approx(cases[0]["base"]["share_of_ceiling"] / each["share_of_ceiling"])
    done = linnet(*words, "--limit", "1", code=1)  # a decode of one batch row is far from that of 256
    assert "ratio" in done.stdout and "B=256" in done.stdout and " !" in done.stdout
    assert "| ratio |" in linnet(*words, "--markdown", "--limit", "1000000").stdout


def test_what_does_not_fit_into_memory_is_not_possible_here():
    line = "softmax B=1024 Tq=1048576 Tk=Tq H=1024 Hkv=H K=64 V=K"
    assert "does not fit into the memory" in linnet("bench", "--case", line, code=3).stderr


def test_peers_without_torch_say_what_to_install(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = linnet("bench", "--quick", "--peers", "--python", sys.executable, "--case", TINY, code=3,
                  env={"PYTHONPATH": str(tmp_path)})
    assert "pip install torch" in done.stderr and "no torch here" in done.stderr
    assert "pip install torch" in linnet("bench", "--peers", "--python", "/bin/false", "--case", TINY, code=3).stderr
    done = linnet("bench", "--peers", "--python", "/nowhere/python", "--case", TINY, code=3)
    assert "'/nowhere/python' has none (it cannot be started: No such file or directory)" in done.stderr
    assert "pip install torch" in linnet("bench", "--peers", "--case", TINY, code=3, env={"LINNET_PYTHON": "/bin/false"}).stderr


def test_peers_run_beside_ours():
    pytest.importorskip("torch")
    words = [word for line in (TINY, TINY_LINEAR, TINY_DECODE, TINY_CACHE) for word in ("--case", line)]
    alone = "softmax_merge P=2 B=1 T=4 H=1 V=8 dtype=f32 pass=fwd"  # nobody else offers it
    result = json.loads(linnet("bench", "--quick", "--json", "--peers", "--python", sys.executable, *words, "--case", alone).stdout)
    assert result["peers"].startswith("torch ")
    for case in result["cases"][:-1]:
        assert case["peer"] and case["peer_seconds"]["median"] > 0
        assert case["ratio"] == pytest.approx(case["peer_seconds"]["median"] / case["seconds"]["median"])
    assert "peer" not in result["cases"][-1]


def test_a_peer_that_fails_leaves_the_others(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text(
        "import torch.nn.functional as f\ndef fail(*_, **__): raise ValueError('not today')\n"
        "f.scaled_dot_product_attention = fail\n")
    done = linnet("bench", "--quick", "--json", "--peers", "--python", sys.executable, "--case", TINY.replace("|fwd+bwd", ""),
                  "--case", TINY_DECODE, env={"PYTHONPATH": str(tmp_path)})
    failed, other = json.loads(done.stdout)["cases"]
    assert "peer" not in failed and other["peer"]
    assert "peer of softmax: ValueError: not today" in done.stderr
