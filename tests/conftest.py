"""The package under test is the one in the build folder (LINNET_BUILD, or build): make test, or pytest after it."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve()
# Before torch is loaded: idle OpenMP threads sleep. Spinning ones made the tests six times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(BUILD / "python"))
