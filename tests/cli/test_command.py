"""linnet itself, list and info: output, exit codes and sentences."""

import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINNET = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve() / "linnet"
COMMANDS = ["list", "info", "check", "bench", "compare"]


def linnet(*words, code=0, env=None):
    done = subprocess.run([LINNET, *words], capture_output=True, text=True, timeout=300, env={**os.environ, **(env or {})})
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


def test_help_names_every_command():
    text = linnet("--help").stdout
    assert all(re.search(rf"^  {command}  +\w", text, re.MULTILINE) for command in COMMANDS)
    assert linnet("-h").stdout == text
    assert linnet(code=2).stdout == text


def test_version():
    assert re.fullmatch(r"linnet \d+\.\d+\.\d+\n", linnet("--version").stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option(command):
    text = linnet(command, "--help").stdout
    assert text.startswith(f"linnet {command}: ") and f"usage: linnet {command}" in text
    assert "--json" in text and "--help" in text
    assert linnet(command, "-h").stdout == text and linnet("help", command).stdout == text


@pytest.mark.parametrize("words, piece", [
    (["lst"], "there is no command 'lst'; did you mean 'list'?"),
    (["zzzzzz"], "there is no command 'zzzzzz'; see linnet --help"),
    (["--lst"], "there is no command '--lst'"),
    (["list", "--jsn"], "list: there is no option --jsn; did you mean --json?"),
    (["list", "--zzzzzz"], "list: there is no option --zzzzzz; see linnet list --help"),
    (["list", "--json=1"], "list: --json takes no value"),
    (["list", "-j"], "list: there is no option -j"),
    (["list", "softmax"], "list: it takes no argument, 'softmax' was given; linnet info softmax describes one operator"),
    (["info"], "info: which operator or layer?"),
    (["info", "softmax", "linear"], "info: one operator at a time, 2 were given"),
    (["info", "liner"], "info: there is no operator or layer 'liner'; did you mean 'linear'?"),
    (["info", "zzzzzzzz"], "info: there is no operator or layer 'zzzzzzzz'; linnet list shows them"),
    (["info", "--", "--json"], "there is no operator or layer '--json'"),
    (["help", "lst"], "there is no command 'lst'; did you mean 'list'?"),
    (["compare", "--html", ""], "compare: --html is empty, expected FILE"),
    (["compare", "--input="], "compare: --input is empty, expected FILE"),
])
def test_bad_input_is_told_in_one_sentence(words, piece):
    done = linnet(*words, code=2)
    assert piece in done.stderr and len(done.stderr.strip().splitlines()) == 1 and done.stdout == ""


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["info", "softmax"], ["check", "softmax", "--random", "1"]])
def test_wrong_environment_is_told(command):
    assert "LINNET_ISA is 'sse9', expected portable, avx2 or avx512" in linnet(*command, code=2, env={"LINNET_ISA": "sse9"}).stderr


@pytest.mark.parametrize("variable, value, piece", [
    ("LINNET_THREADS", "two", "LINNET_THREADS is 'two', expected 1 to 1024"),
    ("LINNET_THREADS", "0", "LINNET_THREADS is '0', expected 1 to 1024"),
    ("LINNET_THREADS", "2x", "LINNET_THREADS is '2x', expected 1 to 1024"),
    ("LINNET_IMPL", "sofmax:ref", "LINNET_IMPL: there is no operator 'sofmax'; did you mean 'softmax'?"),
    ("LINNET_IMPL", "linear:ref,softmax:", "LINNET_IMPL: 'softmax:' names no implementation"),
    ("LINNET_IMPL", "softmax:fast", "softmax: there is no implementation 'fast'"),
])
def test_wrong_variables_are_not_passed_over(variable, value, piece):
    assert piece in linnet("list", code=2, env={variable: value}).stderr
    assert linnet("list", "--help", env={variable: value}).stderr == ""


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["info", "softmax"], ["--help"], ["check", "softmax", "--random", "1"]])
def test_lost_output_is_told(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([LINNET, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 3 and done.stderr == "linnet: the output cannot be written: No space left on device\n"


def test_list():
    text = linnet("list").stdout
    result = json.loads(linnet("list", "--json").stdout)
    assert result["threads"] >= 1 and result["isa"] in ("portable", "avx2", "avx512")
    for op in result["operators"]:
        line, = [line for line in text.splitlines() if line.split()[:1] == [op["name"]]]
        assert op["summary"] in line and (" bwd " in line) == op["backward"]
        usable = [each["name"] for each in op["implementations"] if each["usable"]]
        assert op["chosen"] in usable and usable[0] == "ref"
        assert all(each["usable"] == (each["reason"] == "") for each in op["implementations"])


def test_list_obeys_the_environment():
    def chosen(name, **env):
        return {op["name"]: op["chosen"] for op in json.loads(linnet("list", "--json", env=env).stdout)["operators"]}[name]
    assert chosen("softmax", LINNET_ISA="portable") == "portable"
    assert chosen("softmax", LINNET_IMPL="ref") == "ref"
    assert chosen("softmax", LINNET_IMPL="softmax:ref") == "ref"
    assert chosen("linear", LINNET_IMPL="softmax:ref") == chosen("linear")
    assert json.loads(linnet("list", "--json", env={"LINNET_THREADS": "3"}).stdout)["threads"] == 3


@pytest.mark.parametrize("name, letters", [
    ("softmax", "B batch rows, Tq queries, Tk keys, H heads, Hkv heads of keys, K channels of keys, V channels of values, N sequences"),
    ("softmax_decode", None), ("softmax_paged", None), ("softmax_merge", None), ("linear", None), ("linear_decode", None),
    ("causal_conv", "B batch rows, T tokens, W taps, N sequences"),
    ("mamba_ssd", "B batch rows, T tokens, H heads, G groups of heads, K channels of keys, V channels of values, N sequences")])
def test_info(name, letters):
    text = linnet("info", name).stdout
    assert letters is None or f"\n  {letters}\n" in text
    declared = json.loads(linnet("info", name, "--json").stdout)
    assert declared["name"] == name and declared["summary"] in text and declared["equation"] in text
    for each in declared["inputs"] + declared["outputs"]:
        assert f"[{', '.join(each['shape'])}]" in text and each["doc"] in text
    for each in declared["options"]:
        assert re.search(rf"^  {each['name']} ", text, re.MULTILINE) and each["doc"] in text
    for each in declared["implementations"]:
        assert re.search(rf"^  {each['name']} .*({'chosen|usable' if each['usable'] else 'no: '})", text, re.MULTILINE)


def test_info_knows_mechanisms():
    text = linnet("info", "mamba").stdout
    assert "mamba_ssd" in text and "mamba_selective_scan_decode" in text
    known = json.loads(linnet("info", "mamba", "--json").stdout)
    assert known["mechanism"] == "mamba" and "mamba_ssd" in {op["name"] for op in known["operators"]}
    assert "did you mean 'mamba'?" in linnet("info", "manba", code=2).stderr


CALL = "B=1 T=2048 Hq=16 Hk=16 Hv=16 K=128 V=128 dtype=bf16 pass=bwd"


@pytest.mark.parametrize("name, case, env, forward, backward", [
    ("delta", CALL, {}, "cuda.delta", "cuda.delta"),
    ("delta", "delta " + CALL, {}, "cuda.delta", "cuda.delta"),
    ("delta", CALL + " l2_norm=1", {}, "cuda.delta", "cuda.delta"),
    ("delta", CALL.replace("K=128 V=128", "K=96 V=80"), {}, "cuda.delta", "cuda.delta"),
    ("delta", CALL.replace("K=128 V=128", "K=192 V=192"), {}, "cuda.general", "cuda.general"),
    ("delta", CALL, {"LINNET_IMPL": "delta:cuda.step"}, "cuda.step", "cuda.step"),
    ("delta", CALL, {"LINNET_IMPL": "delta:cuda"}, "cuda.delta", "cuda.delta"),
    ("gla", CALL, {}, "cuda.channel", "cuda.channel"),
    ("softmax", "pass=bwd", {}, "cuda.plain", "cuda.plain"),
    ("grid_conv", "height=2 width=3 side=3 dtype=f64 pass=bwd", {}, None, None)])
def test_info_of_a_case_says_which_row_takes_it_and_why(name, case, env, forward, backward):
    found = json.loads(linnet("info", name, "--case", case, "--json", env=env).stdout)
    for each, expected in (("fwd", forward), ("bwd", backward)):
        rows = [row for row in found["choices"] if row["pass"] == each]
        assert [row["name"] for row in rows if row["chosen"] and row["device"] == "cuda"] == ([expected] if expected else [])
        assert len([row for row in rows if row["chosen"] and row["device"] == "cpu"]) == 1
        assert all((row["reason"] == "") == row["takes"] for row in rows)
    text = linnet("info", name, "--case", case, env=env).stdout
    assert found["case"] in text and ("chosen on a GPU" in text) == (forward is not None)
    for row in found["choices"]:
        assert re.search(rf"^  {re.escape(row['name'])} .*{'yes' if row['takes'] else 'no: ' + re.escape(row['reason'])}", text, re.MULTILINE)


@pytest.mark.parametrize("case, sentence", [
    ("K=sixty", "case delta: K is 'sixty', expected a whole number"), ("impl=cuda.tile", "there is no implementation 'cuda.tile'"),
    ("depth=3", "there is no letter or option 'depth'")])
def test_info_of_a_wrong_case(case, sentence):
    done = linnet("info", "delta", "--case", case, code=2)
    assert sentence in done.stderr


def test_info_says_how_the_implementation_was_chosen():
    assert "LINNET_IMPL=softmax:ref is set" in linnet("info", "softmax", env={"LINNET_IMPL": "softmax:ref"}).stdout
    assert "within LINNET_ISA=portable" in linnet("info", "softmax", env={"LINNET_ISA": "portable"}).stdout
    assert "LINNET_ISA=portable|avx2|avx512" in linnet("info", "softmax").stdout
