"""Checkpoints of a running conversion: a folder that is there in full or not at all."""

import json
import os
import pathlib
import shutil


def sync(path):
    """The file or folder is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(temporary, target):
    """The finished temporary folder takes the place of the target. Killed between the two renames, `.old` still has the last one."""
    for file in pathlib.Path(temporary).iterdir():
        sync(file)
    sync(temporary)
    old = pathlib.Path(f"{target}.old")
    shutil.rmtree(old, ignore_errors=True)
    if pathlib.Path(target).exists():
        os.rename(target, old)
    os.rename(temporary, target)
    sync(pathlib.Path(target).parent)
    shutil.rmtree(old, ignore_errors=True)


def save(folder, tensors, facts):
    """Writes tensors (a dictionary) and facts (JSON) as `folder`."""
    from safetensors.torch import save_file

    temporary = pathlib.Path(f"{folder}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, temporary / "state.safetensors")
    (temporary / "state.json").write_text(json.dumps(facts))
    replace_folder(temporary, folder)


def load(folder):
    """(tensors, facts) of the newest whole checkpoint, or None."""
    from safetensors.torch import load_file

    for path in (pathlib.Path(folder), pathlib.Path(f"{folder}.old")):
        if (path / "state.json").exists():
            return load_file(path / "state.safetensors"), json.loads((path / "state.json").read_text())
    return None
