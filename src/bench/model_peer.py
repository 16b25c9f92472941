"""Peers of whole models (src/bench/model.h): llama.cpp for GGUF files, transformers for every model it loads."""

import contextlib
import gc
import importlib.metadata
import os
import pathlib

LLAMA_ROOM = 8192  # tokens of a llama.cpp context, unless a case has more
LLAMA_LINES = {"llama_cpp": "llama-cpp-python==0.3.36 --no-binary llama-cpp-python", "xllamacpp": "xllamacpp"}
kept = {}  # models and engines of the cases before: loading takes longer than most cases do


def model_tokens(case):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(case["vocabulary"], (case["T"],), generator=generator).tolist()


class NativeLlama:
    """llama.cpp as llama-cpp-python built it on this machine."""

    def __init__(self, path, room):
        import llama_cpp

        threads = torch.get_num_threads()
        self.llama = llama_cpp.Llama(path, n_ctx=room, n_threads=threads, n_threads_batch=threads, verbose=False)
        self.held = []
        self.name = "llama.cpp (llama-cpp-python " + importlib.metadata.version("llama-cpp-python") + ", built here)"

    def prefill(self, tokens):
        self.llama.reset()
        self.llama.eval(tokens)
        self.held = tokens

    def decode(self, tokens):
        """A token behind these, which are read once."""
        if self.held != tokens:
            self.prefill(tokens)
        if not len(tokens) <= self.llama.n_tokens <= len(tokens) + 64:  # back to where the comparison stands
            self.llama.n_tokens = len(tokens)
        self.llama.eval(tokens[:1])


class WheelLlama:
    """llama.cpp as the wheel xllamacpp brings it; it tells its times itself."""

    def __init__(self, path, room):
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = path
        settings.n_ctx, settings.n_parallel, settings.warmup = room, 1, False
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # its threads write to the stream itself, whenever they like
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        self.server = xllamacpp.Server(settings)
        self.name = "llama.cpp (wheel xllamacpp " + importlib.metadata.version("xllamacpp") + ")"

    def timings(self, tokens, count, remember):
        answer = self.server.handle_completions({"prompt": tokens, "n_predict": count, "cache_prompt": remember,
            "ignore_eos": True, "temperature": 0})
        return (json.loads(answer) if isinstance(answer, str) else answer)["timings"]

    def prefill(self, tokens):
        return self.timings(tokens, 1, False)["prompt_ms"] / 1e3

    def decode(self, tokens):
        return self.timings(tokens, 17, True)["predicted_per_token_ms"] / 1e3


def llama_engine(kind, path, room):
    """The only llama.cpp engine in this process: idle threads of another one take half of its speed."""
    if kept.get("engine", (None,))[0] != (kind, path, room):
        kept.pop("engine", None)
        gc.collect()
        kept["engine"] = (kind, path, room), kind(path, room)
    return kept["engine"][1]


def llama_cpp(case, work):
    """The faster of the llama.cpp engines that this Python has, each tried alone on a short text; None where there is none."""
    path, room = case.options["path"], max(LLAMA_ROOM, case["T"] + 128)
    if not path.endswith(".gguf"):
        return None
    if work not in kept:
        text = model_tokens(case)[:256 if work == "prefill" else 32]
        seconds = {}
        for kind, package in ((NativeLlama, "llama_cpp"), (WheelLlama, "xllamacpp")):
            try:
                engine = llama_engine(kind, path, room)
            except ImportError:
                notes.append(f"{package} is missing: {sys.executable} -m pip install {LLAMA_LINES[package]}")
                continue
            seconds[kind] = float("inf")
            for _ in range(4):
                start = time.perf_counter()
                told = getattr(engine, work)(text)
                seconds[kind] = min(seconds[kind], told or time.perf_counter() - start)
            del engine
        kept[work] = min(seconds, key=seconds.get, default=None)
    return kept[work] and llama_engine(kept[work], path, room)


def llama_named(case, work):
    engine = llama_cpp(case, work)
    return engine and engine.name


def transformers_model(case):
    """The model in bf16, with Linnet's attention where the package is found."""
    if "transformers" in kept:
        return kept["transformers"]
    try:
        import transformers
    except ImportError:
        notes.append(f"transformers is missing: {sys.executable} -m pip install transformers==5.22.2 gguf accelerate")
        return None, ""
    attention, own = "sdpa", ""
    if place := os.environ.get("LINNET_PACKAGE"):
        sys.path.insert(0, place)
    try:
        import linnet

        linnet.register_with_transformers()
        attention, own = "linnet", ", Linnet's attention"
    except (ImportError, OSError):
        notes.append("transformers runs its own attention: this Python has no linnet (a build with -DLINNET_TORCH=ON makes it)")
    path = pathlib.Path(case.options["path"])
    where = {}
    if path.suffix == ".gguf":  # as dense matrices: faster there than the packed blocks
        where = {"gguf_file": path.name, "quantization_config": transformers.GgufConfig(dequantize=True)}
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent if where else path, dtype=torch.bfloat16,
            attn_implementation=attention, **where)
    kept["transformers"] = model.eval(), "transformers " + transformers.__version__ + ", bf16" + own
    return kept["transformers"]


def transformers_prefill(model, tokens):
    with torch.no_grad():
        kept["past"] = tokens, model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1).past_key_values


def model_prefill(case):
    tokens = model_tokens(case)
    if case.options["peer"] == "llama.cpp":
        return llama_named(case, "prefill") and (llama_named(case, "prefill"), lambda: llama_cpp(case, "prefill").prefill(tokens))
    model, name = transformers_model(case)
    return model and (name, lambda: transformers_prefill(model, tokens))


def model_decode(case):
    tokens = model_tokens(case)
    if case.options["peer"] == "llama.cpp":
        return llama_named(case, "decode") and (llama_named(case, "decode"), lambda: llama_cpp(case, "decode").decode(tokens))
    model, name = transformers_model(case)
    if model is None:
        return None
    if kept.get("past", ([],))[0] != tokens:
        transformers_prefill(model, tokens)
    cache = kept["past"][1]

    def step():
        with torch.no_grad():
            if cache.get_seq_length() > len(tokens) + 64:
                cache.crop(len(tokens) - cache.get_seq_length())  # negative: so many tokens less
            model(torch.tensor([tokens[:1]]), past_key_values=cache, use_cache=True)
    return name, step
