"""What the tests of the runtime share: the module under test, where it was built, and the files they may have."""

from conftest import BUILD  # noqa: F401
from linnet import runtime  # noqa: F401
from model_files import MINILM, SMOLLM2, WIKITEXT, need, wikitext  # noqa: F401
