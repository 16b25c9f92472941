"""linnet check: files, cases, random cases; exit codes and sentences."""

import json
import os
import pathlib
import struct
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"
VECTORS = ROOT / "tests" / "vectors"
# Analyses, tasks and whole layers are no operators.
OTHERS = [
    path.name
    for path in VECTORS.glob("*.safetensors")
    if path.name.split("-")[0] in ("dsf", "icl", "tasks") or "-layer" in path.name
]
OURS = sorted(path.name for path in VECTORS.glob("*.safetensors") if path.name not in OTHERS)
SMALL = "softmax B=2 Tq=33 Tk=33 H=4 Hkv=2 K=16 V=24 causal=1 with=bias,sinks dtype=bf16 pass=bwd threads=3 seed=7"


def linnet(*words, code=0, env=None):
    done = subprocess.run([LINNET, "check", *words], capture_output=True, text=True, timeout=300, env={**os.environ, **(env or {})})
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


def write(path, tensors, metadata):
    """A safetensors file of float64 tensors: name -> (shape, values)."""
    header, data = {"__metadata__": metadata}, b""
    for name, (shape, values) in tensors.items():
        raw = struct.pack(f"<{len(values)}d", *values)
        header[name] = {"dtype": "F64", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def one_key(out):
    """One query that sees one key: out = v."""
    return {"q": ([1, 1, 1, 1], [0.5]), "k": ([1, 1, 1, 1], [2.0]), "v": ([1, 1, 1, 1], [3.0]), "out": ([1, 1, 1, 1], [out])}


ATTENTION = {"mechanism": "softmax", "operator": "attention"}


def test_vectors_pass_in_every_dtype_and_others_are_skipped():
    done = linnet(str(VECTORS))
    lines = done.stdout.splitlines()
    for name in OURS:
        for dtype in ("f64", "f32", "bf16", "f16"):
            rows = [line.split() for line in lines if line.startswith(name) and f" {dtype} " in line]
            assert rows and all(row[-1] == "ok" for row in rows), (name, dtype)
    assert {line.split(":")[0] for line in lines if ": skipped:" in line} <= set(OTHERS)
    assert " passed, 0 failed, " in lines[-1] and int(lines[-1].split()[0]) >= 4 * len(OURS)


def test_json_has_every_number():
    result = json.loads(linnet(str(VECTORS / "softmax-full.safetensors"), "--json", "--dtype", "f32").stdout)
    assert result["passed"] == 1 and result["failed"] == 0 and result["skipped"] == []
    check, = result["results"]
    assert check["check"] == "softmax-full.safetensors" and check["dtype"] == "f32" and check["ok"]
    assert [tensor["name"] for tensor in check["tensors"]] == ["out", "lse", "dq", "dk", "dv"]
    for tensor in check["tensors"]:
        assert 0 < tensor["rms"] < tensor["rms_gate"] and 0 < tensor["max"] < tensor["max_gate"]
        assert tensor["max_gate"] == pytest.approx(20 * tensor["rms_gate"])


def test_json_has_the_errors():
    done = linnet("--json", "--case", SMALL.replace("K=16", "K=x"), code=2)
    (sentence,) = json.loads(done.stdout)["refused"]
    assert "K is 'x', expected a whole number" in sentence and sentence in done.stderr
    assert "there is no operator, file or folder 'nowhere'" in json.loads(linnet("--json", "nowhere", code=2).stdout)["error"]


def test_passes_are_chosen():
    def tensors(*words):
        return [tensor["name"] for check in json.loads(linnet("--case", SMALL, "--json", *words).stdout)["results"]
                for tensor in check["tensors"]]
    assert tensors() == ["out", "lse", "dq", "dk", "dv", "dbias", "dsinks"]
    fwd = linnet(str(VECTORS / "softmax-full.safetensors"), "--pass", "fwd", "--dtype", "f64").stdout
    assert " out " in fwd and " dq " not in fwd
    bwd = linnet(str(VECTORS / "softmax-full.safetensors"), "--pass", "bwd", "--dtype", "f64").stdout
    assert " out " not in bwd and " dq " in bwd


def test_a_wrong_result_fails(tmp_path):
    right = write(tmp_path / "right.safetensors", one_key(3.0), ATTENTION)
    wrong = write(tmp_path / "wrong.safetensors", one_key(3.0001), ATTENTION)
    assert linnet(str(right)).stdout.splitlines()[-1].startswith("4 passed, 0 failed, 0 skipped")
    done = linnet(str(wrong), "--dtype", "f64", code=1)
    assert "FAIL" in done.stdout and done.stdout.splitlines()[-1].startswith("0 passed, 1 failed, 0 skipped")
    assert json.loads(linnet(str(wrong), "--dtype", "f64", "--json", code=1).stdout)["failed"] == 1


def test_a_broken_file_is_bad_input_and_the_others_still_run(tmp_path):
    write(tmp_path / "a.safetensors", one_key(3.0), ATTENTION)
    (tmp_path / "b.safetensors").write_bytes(b"\x10")
    write(tmp_path / "c.safetensors", one_key(3.0), ATTENTION)
    write(tmp_path / "d.safetensors", one_key(3.0), {**ATTENTION, "temperature": "1"})
    write(tmp_path / "e.safetensors", {**one_key(3.0), "extra": ([1], [0.0])}, ATTENTION)
    done = linnet(str(tmp_path), "--dtype", "f64", code=2)
    assert done.stdout.splitlines()[-1].startswith("3 passed, 0 failed, 0 skipped")
    assert len(done.stderr.splitlines()) == 2
    assert "b.safetensors" in done.stderr and "d.safetensors: softmax: there is no option 'temperature'" in done.stderr
    assert "e.safetensors: not compared: extra" in done.stdout


def test_cases():
    def tensors(*words):
        return json.loads(linnet(*words, "--json").stdout)["results"]
    assert tensors("--case", SMALL) == tensors("softmax", "--case", SMALL.removeprefix("softmax "))
    lines = linnet("--case", SMALL, "--impl", "ref", "--dtype", "f16").stdout.splitlines()
    assert all(" f16 " in line and " ref " in line for line in lines[1:-1]) and lines[-1].startswith("1 passed")
    linnet("--case", SMALL, "--case", "linear T=65 S=T map=elu1 normalize=1 pass=fwd+bwd", "--threads", "2")


def test_random_cases_repeat_themselves():
    words = ["--random", "12", "softmax", "linear", "--seed", "5", "--json"]
    first, second = (json.loads(linnet(*words).stdout) for _ in range(2))
    assert [check["check"] for check in first["results"]] == [check["check"] for check in second["results"]]
    assert first["passed"] == 12
    other = json.loads(linnet(*words, "--seed", "6").stdout)
    assert [check["check"] for check in first["results"]] != [check["check"] for check in other["results"]]
    for check in first["results"][:3]:  # the printed line is the case
        again, = json.loads(linnet("--case", check["check"], "--json").stdout)["results"]
        assert again["check"] == check["check"] and again["tensors"] == check["tensors"]


def test_random_table_has_a_row_for_each_tensor():
    text = linnet("--random", "30", "softmax", "--dtype", "f32").stdout
    assert "f32 rms, of gate" in text and text.splitlines()[-1].startswith("30 passed, 0 failed, 0 skipped")
    assert any(line.split()[:2] == ["softmax", "dq"] for line in text.splitlines())


def test_random_cases_obey_the_choice_of_an_implementation():
    def impls(*words, **env):
        return {check["impl"] for check in json.loads(linnet("--random", "15", "softmax", "--json", *words, env=env).stdout)["results"]}
    assert impls("--impl", "ref") == {"ref"}
    assert impls(LINNET_IMPL="ref") == {"ref"}
    assert impls(LINNET_IMPL="linear:ref") == impls() != {"ref"}
    assert impls(LINNET_ISA="portable") <= {"ref", "portable"}


@pytest.mark.parametrize("words, code, piece", [
    (["sofmax"], 2, "check: there is no operator, file or folder 'sofmax'; did you mean 'softmax'?"),
    (["no/such/file.safetensors"], 2, "there is no operator, file or folder 'no/such/file.safetensors'"),
    (["softmax", "--dtype", "f8"], 2, "check: --dtype is 'f8', expected all, f64, f32, bf16 or f16"),
    (["softmax", "--pass", "both"], 2, "check: --pass is 'both', expected all, fwd or bwd"),
    (["softmax_paged", "--pass", "bwd"], 2, "none of the operators has a backward"),
    (["softmax", "--device", "cuda"], 3, "; --device cpu checks the CPU's kernels"),
    (["softmax", "--device", "tpu"], 2, "check: --device is 'tpu', expected cpu or cuda"),
    (["softmax", "--impl", "avx51"], 2, "check: no operator has an implementation 'avx51' on the CPU; did you mean 'avx512'?"),
    (["softmax", "--threads", "0"], 2, "check: --threads is '0', expected a whole number from 1 to 256"),
    (["softmax", "--threads", "two"], 2, "check: --threads is 'two'"),
    (["softmax", "--random", "-1"], 2, "check: --random is '-1'"),
    (["softmax", "--random", "0"], 2, "check: --random is '0', expected a whole number from 1 to"),
    (["softmax", "--random"], 2, "check: --random needs a value, N"),
    (["softmax", "--seed", "1.5"], 2, "check: --seed is '1.5'"),
    (["linear", "--impl", "cuda"], 2, "check: no operator has an implementation 'cuda' on the CPU"),
    (["softmax", "--speed"], 2, "check: there is no option --speed; did you mean --seed?"),
    (["--case", "B=2"], 2, "check: --case starts with 'B=2', expected an operator there or before"),
    (["--case", "nothing B=2"], 2, "case: there is no operator 'nothing'"),
    (["softmax", "--case", "B=2 Z=1"], 2, "there is no letter or option 'Z'"),
    (["softmax", "--case", "H=3 Hkv=2"], 2, "softmax: k has 2 heads, expected a divisor of 3"),
    (["softmax", "--case", "Tq=100000000 Tk=100000000 H=64"], 3, "does not fit into the memory"),
    (["softmax", "--case", "B=2", "--impl", "fast"], 2, "no operator has an implementation 'fast'"),
])
def test_bad_input_is_told_in_one_sentence(words, code, piece):
    done = linnet(*words, code=code)
    assert piece in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_an_empty_folder_is_bad_input(tmp_path):
    assert "has no .safetensors file" in linnet(str(tmp_path), code=2).stderr


def test_progress_only_on_a_terminal():
    assert linnet("--random", "20", "linear").stderr == ""
