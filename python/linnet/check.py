"""python -m linnet.check FILE|FOLDER ...: the modules of linnet.nn against vector files, with gradients.

    python -m linnet.check tests/vectors
    python -m linnet.check --dtype f32 delta-layer.safetensors
    python -m linnet.check --device cuda tests/vectors         # f32 there, compared with f64 on the CPU

Files of layers alone are read (`linnet check` reads all); others are counted. In f64 a module is compared with the file, in f32
with the same module in f64. Exit codes: 0 within tolerance, 1 a tensor is not, 2 bad input, 3 no such device here.
"""

import argparse
import ctypes
import json
import pathlib
import struct
import sys

import torch

from . import nn
from ._library import LIBRARY, TOLERANCE

DTYPES = {"f64": torch.float64, "f32": torch.float32}


class BadInput(Exception):
    pass


def read(path):
    """Metadata and tensors of a safetensors file of float64 numbers."""
    data = pathlib.Path(path).read_bytes()
    if len(data) < 8 or (size := struct.unpack("<Q", data[:8])[0]) > len(data) - 8:
        raise BadInput(f"{path} is no safetensors file")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError as error:
        raise BadInput(f"{path} is no safetensors file: {error}") from None
    metadata, tensors = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] == "F64":
            numbers = torch.frombuffer(bytearray(data[8 + size + begin : 8 + size + end]), dtype=torch.float64)
            tensors[name] = numbers.reshape(entry["shape"]) if end > begin else torch.empty(entry["shape"], dtype=torch.float64)
    return metadata, tensors


def layer_of(path):
    """What the library says of the layer that a file is about; None when it is about none."""
    with open(path, "rb") as file:
        if not 0 < int.from_bytes(file.read(8), "little") < 100_000_000:
            raise BadInput(f"{path} is no safetensors file")
    message, needed = ctypes.create_string_buffer(1024), ctypes.c_size_t()
    name = str(path).encode()
    if LIBRARY.linnet_layer_of_file(name, None, ctypes.c_size_t(0), ctypes.byref(needed), message, len(message)) != 0:
        if message.value.decode().endswith("is about no layer"):
            return None
        raise BadInput(message.value.decode())
    text = ctypes.create_string_buffer(needed.value)
    LIBRARY.linnet_layer_of_file(name, text, ctypes.c_size_t(len(text)), ctypes.byref(needed), message, len(message))
    return json.loads(text.value)


def run(about, tensors, dtype, device="cpu"):
    """The module's output and the gradients that the file has, by the file's names."""
    layer = about["layer"]
    options = {option["name"]: option["value"] for option in layer["options"]}
    module = getattr(nn, layer["module"]).from_text(options, dtype=dtype)
    owners = {}
    for parameter in layer["parameters"]:
        name = parameter["alias"] or parameter["name"]
        if name not in tensors:
            if parameter["trained"]:
                raise BadInput(f"there is no tensor {name}, expected {parameter['name']}")
            continue
        value, turned = tensors[name].to(dtype), parameter["transposed"]
        own = module.get_tensor(parameter["name"])
        expected = own.shape[::-1] if turned else own.shape
        if value.shape != expected and (value.numel() != own.numel() or value.ndim == own.ndim):  # heads may be joined with channels
            raise BadInput(f"{name} has shape {list(value.shape)}, expected {list(expected)}")
        with torch.no_grad():
            own.copy_((value.T if turned else value).reshape(own.shape))
        owners[name] = (own, turned)
    module.to(device)  # keeps its parameters, which get other data
    x = tensors[about["input"]].to(device, dtype, copy=True).requires_grad_()
    out = module(x)
    results = {about["output"]: out.detach()}
    if "dout" in tensors:
        out.backward(tensors["dout"].to(device, dtype))
        results["d" + about["input"]] = x.grad
        for name, (own, transposed) in owners.items():
            if own.grad is not None:
                results["d" + name] = (own.grad.T if transposed else own.grad).reshape(tensors[name].shape)
    return {name: each.cpu() for name, each in results.items()}


def gates(about, dtype):
    """RMS error over RMS of the reference, of the output and of gradients (src/core/tolerance.h): f64 against files, f32 against
    f64, wider where a state only grows."""
    kind = "vectors" if dtype == "f64" else "growing" if about["layer"]["growing"] else "reference"
    return TOLERANCE["gates"][dtype][kind]


def compare(got, want, gate, dtype, inputs):
    """The error and whether it is within the gate. `inputs`: the largest number among the file's; a result far below it is all
    cancellation, and its errors count against that."""
    got, want = got.double(), want.double()
    if got.shape != want.shape:
        return float("inf"), False
    if want.numel() and want.abs().max() < TOLERANCE["cancelled"] * inputs:
        error = ((got - want).abs().max() / inputs).item()
        return error, error <= TOLERANCE["cancelled_epsilons"] * torch.finfo(dtype).eps
    scale = want.square().mean().sqrt()
    rms = ((got - want).square().mean().sqrt() / scale).item() if scale > 0 else got.abs().max().item()
    worst = ((got - want).abs().max() / want.abs().max()).item() if scale > 0 else rms
    return rms, rms <= gate and worst <= min(TOLERANCE["max_over_rms"] * gate, TOLERANCE["largest_max"])


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m linnet.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("paths", nargs="+", metavar="FILE|FOLDER")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="f64 and f32 when not given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print("linnet.check: torch sees no GPU here", file=sys.stderr)
            return 3
        if "f64" in (options.dtype or ()):
            print("linnet.check: --dtype f64 is for the CPU", file=sys.stderr)
            return 2
        options.dtype = ["f32"]
    failed = checked = skipped = 0
    try:
        for path in options.paths:
            path = pathlib.Path(path)
            if not path.exists():
                raise BadInput(f"{path} does not exist")
            for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
                about = layer_of(file)
                if about is None:
                    skipped += 1
                    continue
                metadata, tensors = read(file)
                if not metadata.get("operator", "").endswith("layer"):  # gradients of the operator inside, not of the layer
                    tensors.pop("dout", None)
                inputs = max([1.0, *(each.abs().max().item() for each in tensors.values() if each.numel())])
                for name in options.dtype or DTYPES:
                    got = run(about, tensors, DTYPES[name], options.device)
                    # A lower type is compared with the module in f64 on the rounded numbers.
                    want = {key: tensors[key] for key in got if key in tensors}
                    if name != "f64":
                        want = run(about, {key: value.to(DTYPES[name]).double() for key, value in tensors.items()}, torch.float64)
                    for key in want:
                        gate = gates(about, name)[key != about["output"]]
                        rms, good = compare(got[key], want[key], gate, DTYPES[name], inputs)
                        checked, failed = checked + 1, failed + (not good)
                        verdict = "ok" if good else "FAILED"
                        print(f"{verdict:6} {about['layer']['module']:20} {name} {key:8} error {rms:.1e}, gate {gate:.1e}  {file.name}")
    except BadInput as error:
        print(f"linnet.check: {error}", file=sys.stderr)
        return 2
    print(f"{checked} tensors, {failed} failed; {skipped} files are about no layer")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
