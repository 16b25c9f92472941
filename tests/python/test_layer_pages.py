"""Vector files of layers written from the pages a second time (layer_pages.py), run by the command and by the modules: in f64 with
gradients, in lower types the output, at once, in pieces and token by token. (Gradients in f32 depend on how such numbers fall.)"""

import os
import pathlib
import subprocess

import layer_pages
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import linnet.check

COMMAND = pathlib.Path(os.environ.get("LINNET_BUILD", "build")) / "linnet"


@pytest.mark.parametrize("name", sorted(layer_pages.CASES))
def test_files_of_the_pages(name, tmp_path, capsys):
    path = layer_pages.write(name, tmp_path)
    ran = subprocess.run([COMMAND, "check", path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " 0 failed, 0 skipped" in ran.stdout, ran.stdout
    assert linnet.check.main(["--dtype", "f64", str(path)]) == 0, capsys.readouterr()
    assert ", 0 failed; 0 files" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["linear-layer", "softmax-layer", "taylor-layer", "gla-layer-grouped"])
def test_other_words_of_the_metadata(name, tmp_path):
    """num_heads for heads: what libraries call the same option."""
    path = layer_pages.write(name, tmp_path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}
    words = {"heads": "num_heads", "kv_heads": "num_kv_heads", "block": "block_size", "steps": "num_steps", "causal": "is_causal"}
    save_file(tensors, path, {words.get(key, key): value for key, value in metadata.items()})
    ran = subprocess.run([COMMAND, "check", path], capture_output=True, text=True)
    assert ran.returncode == 0 and " 0 failed, 0 skipped" in ran.stdout, ran.stdout + ran.stderr
