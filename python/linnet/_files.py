"""Tensors in files of the safetensors format: 8 bytes with the size of a JSON header, the header, the numbers."""

import ctypes
import json
import mmap
import os
import pathlib

import torch

KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in KINDS.items()}
LARGEST_HEADER = 100_000_000


def write_tensors(path, tensors, metadata=None):
    """Writes tensors by name; the file appears under its name when it is complete."""
    header, end = {"__metadata__": {"format": "pt", **(metadata or {})}}, 0
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in kept.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"{path}: {name} is {tensor.dtype}, which the format has not")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = pathlib.Path(f"{path}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in kept.values():
                if tensor.nbytes:
                    file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(path):
    """The tensors of a file by name. They lie in the file until something writes to them."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, LARGEST_HEADER):
            raise ValueError(f"{path} is no safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = KINDS.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        if dtype is None:
            raise ValueError(f"{path}: {name} has type {entry['dtype']}, expected one of {', '.join(KINDS)}")
        count = 1
        for extent in shape:
            count *= extent
        if not 0 <= begin <= end <= size - 8 - length or end - begin != count * dtype.itemsize:
            raise ValueError(f"{path}: {name} lies outside of the file")
        place = 8 + length + begin
        if count == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
        elif place % dtype.itemsize:
            tensors[name] = torch.frombuffer(bytearray(data[place : place + end - begin]), dtype=dtype).reshape(shape)
        else:
            tensors[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=place).reshape(shape)
    return tensors


def read_checkpoint(folder):
    """The tensors of a model's folder: model.safetensors, or the shards that its index names."""
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_tensors(folder / "model.safetensors")
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for shard in shards for name, tensor in read_tensors(folder / shard).items()}
