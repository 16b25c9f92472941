"""GGUF blocks against the gguf package, bit for bit."""

import gguf
import numpy
import pytest
from runtime_cases import runtime

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K"]
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # scales


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_the_package(kind):
    random = numpy.random.default_rng(7)
    quantization = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    count = 2000
    if kind in HALVES:
        blocks = random.integers(0, 256, (count, size), dtype=numpy.uint8)
        for offset in HALVES[kind]:  # any finite half, subnormal ones included
            scales = random.integers(0, 0x7C00, count).astype(numpy.uint16) | (random.integers(0, 2, count) << 15).astype(numpy.uint16)
            blocks[:, offset : offset + 2] = scales.view(numpy.uint8).reshape(count, 2)
    else:
        dtype = numpy.float32 if kind == "F32" else numpy.float16
        blocks = random.standard_normal((count, 1)).astype(dtype).view(numpy.uint8)
    expected = gguf.quants.dequantize(blocks, quantization).astype(numpy.float32).reshape(-1)
    got = numpy.array(runtime.dequantize(kind, blocks.tobytes(), count * block), dtype=numpy.float32)
    assert (expected.view(numpy.uint32) == got.view(numpy.uint32)).all()


def test_a_part_of_a_block_is_refused():
    with pytest.raises(ValueError, match="33 elements, expected a multiple of 32"):
        runtime.dequantize("Q8_0", b"\0" * 68, 33)
    with pytest.raises(ValueError, match="there is no type 'Q9_9'"):
        runtime.dequantize("Q9_9", b"", 0)
