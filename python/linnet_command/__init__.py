"""Starts the command of the installed package. A package of its own: `import linnet` would load torch before the first word."""

import importlib.util
import os
import pathlib
import sys


def main():
    package = pathlib.Path(importlib.util.find_spec("linnet").origin).parent
    os.environ.setdefault("LINNET_PYTHON", sys.executable)  # for what the command starts in Python: peers, train, convert
    command = package / "bin" / "linnet"
    os.execv(command, [sys.argv[0], *sys.argv[1:]])
