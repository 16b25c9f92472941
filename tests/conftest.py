"""The package under test is the one in the build folder (LINNET_BUILD, or build): make test, or pytest after it."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve()
sys.path.insert(0, str(BUILD / "python"))
