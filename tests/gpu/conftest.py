import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
