"""linnet.tasks: the functions are made from the library's declarations and give its tensors."""

import inspect

import pytest
import torch

import linnet


def test_every_task_is_a_function():
    assert {"mqar", "recall", "listops", "regbench", "pathfinder", "forecast", "images", "text"} <= set(linnet.tasks.names())
    for name in linnet.tasks.names():
        function = getattr(linnet.tasks, name)
        assert "Options:" in function.__doc__ and "Tensors:" in function.__doc__
        assert list(inspect.signature(function).parameters) == [o["name"] for o in linnet.tasks.DECLARATIONS[name]["options"]]


def test_mqar():
    batch = linnet.tasks.mqar(examples=3, length=32, pairs=4, vocab=64, seed=7)
    assert batch.inputs.shape == (3, 32) and batch.inputs.dtype == torch.int64
    for row in range(3):
        values = dict(zip(batch.inputs[row, 0:8:2].tolist(), batch.inputs[row, 1:8:2].tolist()))
        asked = batch.labels[row] != -100
        assert [values[key] for key in batch.inputs[row, asked].tolist()] == batch.labels[row, asked].tolist()
    again = linnet.tasks.mqar(examples=3, length=32, pairs=4, vocab=64, seed=7)
    assert torch.equal(batch.inputs, again.inputs)


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("recall", {"examples": 2, "length": 16}, {"inputs": (2, 15), "next": (2, 15), "probe": (2, 15)}),
        ("selective_copy", {"examples": 2, "length": 40, "items": 6}, {"inputs": (2, 40), "targets": (2, 40)}),
        ("pathfinder", {"examples": 2}, {"pixels": (2, 1024), "label": (2,)}),
        ("forecast", {"rows": 400, "cut": True, "split": "test"}, {"scaled": (400, 7), "mse": ()}),
        ("mqar", {"examples": 0}, {"inputs": (0, 64), "gaps": (0, 4)}),
    ],
)
def test_shapes(name, options, shapes):
    batch = getattr(linnet.tasks, name)(**options)
    for tensor, shape in shapes.items():
        assert getattr(batch, tensor).shape == shape


def test_errors_are_the_librarys_sentences():
    with pytest.raises(ValueError, match="mqar: length is 63, expected an even number"):
        linnet.tasks.mqar(length=63)
    with pytest.raises(ValueError, match="mqar: there is no option 'lenght'"):
        linnet.tasks.mqar(lenght=64)
