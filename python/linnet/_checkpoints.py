"""Checkpoints of a run that outlive a kill at any moment: RUN/checkpoints/step-00000200/.

A checkpoint is written into a temporary folder, every file and the folder are brought to the disk, and one rename makes it count.
The newest and the best are kept. checkpoint.json names the files with their sizes and SHA-256, so that a damaged one is told
before anything is read from it:

    model.safetensors, config.json    the model, as `linnet generate` reads it (config.json where the model has tokens)
    trainer.pt                        head, optimiser, step, best score, seconds
"""

import hashlib
import json
import os
import pathlib
import re
import shutil

import torch

from ._files import read_tensors, write_tensors

FORMAT = "linnet train 1"
_NAME = re.compile(r"step-(\d{8})")


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be read: the sentence says which file and why."""


def _to_disk(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run):
        self.folder = pathlib.Path(run) / "checkpoints"

    def steps(self):
        """Steps that have a checkpoint, the oldest first. Folders that were never renamed do not count."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def path(self, step):
        return self.folder / f"step-{step:08d}"

    def save(self, step, model, config, trainer, best_step):
        """Writes the checkpoint of `step`; then those that are neither the newest nor the best go."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob("unfinished-*"):  # of a process that was killed
            shutil.rmtree(left)
        temporary = self.folder / f"unfinished-{step:08d}"
        temporary.mkdir()
        try:
            write_tensors(temporary / "model.safetensors", model)
            torch.save(trainer, temporary / "trainer.pt")
            if config is not None:
                (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            files = {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in sorted(temporary.iterdir())}
            (temporary / "checkpoint.json").write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2) + "\n")
            for file in temporary.iterdir():
                _to_disk(file)
            _to_disk(temporary)
            if self.path(step).exists():  # the same step once more: the same numbers
                shutil.rmtree(self.path(step))
            temporary.rename(self.path(step))
            _to_disk(self.folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for other in self.steps():
            if other not in (step, best_step):
                shutil.rmtree(self.path(other))

    def load(self, step):
        """(model, trainer) of a step. Every file is compared with its SHA-256 first."""
        folder = self.path(step)

        def refuse(why):
            older = [other for other in self.steps() if other < step]
            hint = f"; remove {folder} to go on from step {older[-1]}" if older else f"; remove {folder} to begin anew"
            return BadCheckpoint(f"{folder}: {why}; nothing was changed{hint}")

        try:
            about = json.loads((folder / "checkpoint.json").read_text())
            form = about["format"]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise refuse(f"this is no checkpoint of linnet train ({type(problem).__name__} in checkpoint.json)") from None
        if form != FORMAT or about.get("step") != step or not isinstance(about.get("files"), dict):
            raise refuse(f"checkpoint.json says format {form!r}, step {about.get('step')}, expected {FORMAT!r}, step {step}")
        for name, expected in about["files"].items():
            file = folder / name
            if not file.is_file():
                raise refuse(f"{name} is missing")
            if file.stat().st_size != expected["bytes"]:
                raise refuse(f"{name} has {file.stat().st_size} bytes, expected {expected['bytes']}")
            if _digest(file) != expected["sha256"]:
                raise refuse(f"{name} has changed: its SHA-256 is another")
        return read_tensors(folder / "model.safetensors"), torch.load(folder / "trainer.pt", weights_only=True)
