"""What the tests of the runtime share: the module under test, where it was built, and the files they may have."""

import os
import pathlib

from linnet import runtime  # noqa: F401
from model_files import MINILM, SMOLLM2, WIKITEXT, need, save_tokenizer, wikitext  # noqa: F401

BUILD = pathlib.Path(os.environ.get("LINNET_BUILD", pathlib.Path(__file__).resolve().parents[2] / "build")).resolve()
