"""Peers of whole models (src/bench/model.h): llama.cpp for GGUF files, transformers for every model it loads."""

import contextlib
import importlib.metadata
import os
import pathlib


def model_tokens(case):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(case["vocabulary"], (case["T"],), generator=generator)


def llama_cpp(case, room):
    """A context of llama.cpp with room for `room` tokens, or None where it cannot run the file."""
    if not case.options["path"].endswith(".gguf"):
        return None, ""
    try:
        import llama_cpp as package
    except ImportError:
        return None, ""
    llama = package.Llama(case.options["path"], n_ctx=room, n_threads=torch.get_num_threads(), n_threads_batch=torch.get_num_threads(),
        verbose=False)
    return llama, "llama.cpp (llama-cpp-python " + importlib.metadata.version("llama-cpp-python") + ")"


def transformers_model(case):
    """The model in bf16, as transformers runs it by default."""
    import transformers

    path = pathlib.Path(case.options["path"])
    where = {}
    if path.suffix == ".gguf":  # as dense matrices: faster there than the packed blocks
        where = {"gguf_file": path.name, "quantization_config": transformers.GgufConfig(dequantize=True)}
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent if where else path, dtype=torch.bfloat16, **where)
    return model.eval(), "transformers " + transformers.__version__ + ", bf16"


def model_prefill(case):
    tokens = model_tokens(case)
    if case.options["peer"] == "llama.cpp":
        llama, name = llama_cpp(case, case["T"] + 64)

        def prompt():
            llama.reset()
            llama.eval(tokens.tolist())
        return llama and (name, prompt)
    model, name = transformers_model(case)

    def forward():
        with torch.no_grad():
            return model(tokens[None], use_cache=True, logits_to_keep=1).logits
    return name, forward


def model_decode(case):
    tokens = model_tokens(case)
    if case.options["peer"] == "llama.cpp":
        llama, name = llama_cpp(case, case["T"] + 4096)
        if llama is None:
            return None
        llama.eval(tokens.tolist())

        def token():
            if llama.n_tokens > case["T"] + 64:  # back to where the comparison stands
                llama.n_tokens = case["T"]
            llama.eval([int(tokens[0])])
        return name, token
    model, name = transformers_model(case)
    with torch.no_grad():
        cache = model(tokens[None], use_cache=True, logits_to_keep=1).past_key_values

    def step():
        with torch.no_grad():
            if cache.get_seq_length() > case["T"] + 64:
                cache.crop(case["T"] - cache.get_seq_length())  # negative: so many tokens less
            return model(tokens[None, :1], past_key_values=cache, use_cache=True).logits
    return name, step
