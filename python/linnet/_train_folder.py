"""What linnet.train writes and shows: files that are whole, the lines of a run that was killed, progress on a terminal."""

import contextlib
import json
import os
import pathlib
import re
import sys
import time

import torch


def write_whole(path, text):
    """The file appears complete or not at all."""
    temporary = path.with_name(path.name + ".unfinished")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def is_before(text, step):
    try:
        return text.endswith("\n") and json.loads(text)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False  # the line that a kill cut off


class Progress:
    """One line on a terminal: how far, how fast, how long."""

    def __init__(self, run):
        self.run, self.first, self.start, self.shown = run, run.step, time.monotonic(), 0.0
        self.on = run.rank == 0 and sys.stderr.isatty()

    def show(self, measures):
        now = time.monotonic()
        if not self.on or now - self.shown < 0.2:
            return
        self.shown, done = now, self.run.step - self.first
        speed = done / max(now - self.start, 1e-9)
        left = (self.run.steps - self.run.step) / max(speed, 1e-9)
        values = ", ".join(f"{name} {value:.4g}" for name, value in measures.items())
        print(f"\r\033[Kstep {self.run.step} of {self.run.steps}: {values}; {speed:.3g} steps/s, {left:.0f} s left", end="", file=sys.stderr)

    def clear(self):
        if self.on:
            print("\r\033[K", end="", file=sys.stderr)


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return f"{found.group(1)}, {torch.get_num_threads()} threads"
    return f"CPU, {torch.get_num_threads()} threads"
