#!/usr/bin/env python3
"""Trains the small language model of data/demo_model, which `make demo` converts where no real model can be fetched.

    .venv/bin/python tools/make_demo_model.py --steps 600 --batch 4 --length 512 --rate 6e-3 --out data/demo_model

Llama, 3 layers of 128 channels, a vocabulary of 1,024 pieces; trained on this repository's own pages and sources (Apache-2.0). Pages in
HELD are not read: the demo plans and evaluates on them. The state is saved every 50 steps in OUT.state, and the same command goes on.
"""

import argparse
import json
import pathlib

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[1]
HELD = {"tutorial.md", "understand.md", "which.md", "glossary.md", "run-a-model.md", "convert.md"}
END = "<|endoftext|>"
SHAPE = dict(vocab_size=1024, hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
             max_position_embeddings=1024, tie_word_embeddings=True, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0)  # fmt: skip


def texts():
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in HELD]
    pages += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    sources = [path for end in ("*.h", "*.cc") for path in sorted((ROOT / "src").rglob(end)) if "unicode_tables" not in path.name]
    sources += sorted((ROOT / "python").rglob("*.py"))
    return [path.read_text() for path in pages * 4], [path.read_text() for path in sources]


def tokenizer_of(pages, sources):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(pages + sources, trainers.BpeTrainer(vocab_size=SHAPE["vocab_size"], special_tokens=[END],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))  # fmt: skip
    return tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "data/demo_model")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=6e-3)
    args = parser.parse_args()
    state_file = args.out.with_suffix(".state")
    torch.manual_seed(0)
    pages, sources = texts()
    args.out.mkdir(parents=True, exist_ok=True)
    if state_file.exists():
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    else:
        tokenizer = tokenizer_of(pages, sources)
        tokenizer.save(str(args.out / "tokenizer.json"))
    ids = torch.tensor([i for text in pages + sources for i in [0, *tokenizer.encode(text).ids]])
    held = torch.tensor([i for name in sorted(HELD) for i in [0, *tokenizer.encode((ROOT / "docs" / name).read_text()).ids]])
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(ids):,} tokens, {len(held):,} held out", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)
    step = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    def held_loss():
        rows = held[: len(held) // args.length * args.length].view(-1, args.length)[:8]
        with torch.no_grad():
            return model(rows, labels=rows).loss.item()

    while step < args.steps:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(ids) - args.length, (args.batch,), generator=generator)
        rows = torch.stack([ids[s : s + args.length] for s in starts])
        warm, left = min(1, (step + 1) / 40), 1 - step / args.steps
        for group in optimizer.param_groups:
            group["lr"] = args.rate * warm * (0.05 + 0.95 * left)
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0 or step == args.steps:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, state_file)
            print(f"step {step}: loss {loss.item():.3f}, held-out {held_loss():.3f}", flush=True)

    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    state_file.unlink()
    print(f"{args.out}: {sum(file.stat().st_size for file in args.out.iterdir()) / 1e6:.2f} MB, held-out loss {held_loss():.3f} nats a token")


if __name__ == "__main__":
    main()
