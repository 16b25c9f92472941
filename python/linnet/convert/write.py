"""Stage 10: the converted checkpoint, and reading it again."""

import hashlib
import json
import pathlib
import shutil
import tempfile

import torch

from . import attention, cache, checkpoint, mixers

FORMAT = 1
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
          "chat_template.jinja", "generation_config.json", "preprocessor_config.json", "modules.json", "1_Pooling")  # fmt: skip


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_tensors(model):
    """The model's tensors under the names that they have in files, without the mixers'."""
    from safetensors.torch import load_file

    state = {name: y for name, y in model.state_dict().items() if ".linnet." not in name}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=state, max_shard_size="1000GB")
        return load_file(pathlib.Path(folder) / "model.safetensors")


def new_tensors(sites):
    """The mixers' tensors under their names in the checkpoint."""
    return {f"linnet.layers.{site.index}.{site.mixer.mechanism}.{name}": y.detach().float().cpu().contiguous().clone()
            for site in sites if site.mixer is not None for name, y in site.mixer.state_dict().items()}  # fmt: skip


def source_tensors(source):
    """Tensors of a folder's safetensors files, in their own types."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted(pathlib.Path(source).glob("*.safetensors")):
        found.update(load_file(file))
    return found


def name_in(names, ours, prefix):
    """The name under which a file has our tensor: as it is, or with or without the family's prefix."""
    for name in (ours, ours.removeprefix(f"{prefix}."), f"{prefix}.{ours}"):
        if name in names:
            return name
    return None


def section(sites, facts):
    return {"format": FORMAT, "layers": [site.entry() for site in sites], **facts}


def save(model, sites, path, source=None, facts=None):
    """Writes the folder: what the conversion did not change has the name, type and bytes of the source's file, if there is one."""
    from safetensors.torch import save_file

    path = pathlib.Path(path)
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} is there already and not empty")
    temporary = path.with_name(path.name + ".new")
    shutil.rmtree(temporary, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = own_tensors(model)
    facts = dict(facts or {})
    gguf = pathlib.Path(source) if source and str(source).endswith(".gguf") else None
    source = pathlib.Path(source) if source and pathlib.Path(source).is_dir() else None
    if source and list(source.glob("*.safetensors")):
        theirs, written = source_tensors(source), {}
        for ours, y in tensors.items():
            name = name_in(theirs, ours, model.base_model_prefix)
            if name is None:
                written[ours] = y
            else:
                written[name] = theirs[name] if torch.equal(theirs[name].float(), y.float()) else y.float()
        tensors = written | {name: y for name, y in theirs.items() if name not in written and not name.startswith("linnet.layers.")}
        facts["source"] = {file.name: sha256(file) for file in sorted(source.glob("*.safetensors"))}
    tensors |= new_tensors(sites)
    temporary.mkdir()
    try:
        save_file({name: y.contiguous() for name, y in tensors.items()}, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "model.safetensors").chmod(0o644)
        if source and (source / "config.json").exists():
            config = json.loads((source / "config.json").read_text())
            for name in COPIED:
                if (source / name).is_dir():
                    shutil.copytree(source / name, temporary / name)
                elif (source / name).exists():
                    shutil.copy(source / name, temporary / name)
        else:
            config = model.config.to_dict()
            config.pop("_attn_implementation", None)
            config["architectures"] = [type(model).__name__]
            if gguf:
                import transformers

                transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(temporary)
        config["linnet"] = section(sites, facts)
        (temporary / "config.json").write_text(json.dumps(config, indent=2))
        checkpoint.replace_folder(temporary, path)
    except OSError as problem:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{path} could not be written: {problem}") from problem
    model.config.linnet = config["linnet"]
    return path


def model_class(config):
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    known = {"bert": transformers.AutoModel, "vit": transformers.AutoModelForImageClassification}
    return known.get(config.model_type, transformers.AutoModelForCausalLM)


def load_model(path, dtype=torch.float32):
    """The transformers model of a folder or a GGUF file, in float32."""
    import transformers

    path = pathlib.Path(path)
    try:
        if path.suffix == ".gguf":
            model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
            for owner, name in ((model, "hf_quantizer"), (model, "is_quantized"), (model, "quantization_method"),
                                (model.config, "quantization_config")):  # fmt: skip
                if name in owner.__dict__:  # its weights are dense by now, and may be trained and written
                    delattr(owner, name)
            return model.eval()
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        return model_class(config).from_pretrained(str(path), dtype=dtype, local_files_only=True, use_safetensors=True).eval()
    except (OSError, ValueError, KeyError) as problem:
        raise ValueError(f"{path} cannot be loaded by transformers: {problem}") from problem


def put_mixers(sites, layers, tensors, where):
    """Mixers of a config's list with their parameters; every mismatch is an error with the tensor's name."""
    expected, numbered = set(), {site.index: site for site in sites}
    for entry in layers:
        options = {name: value for name, value in entry.items() if name not in ("index", "mechanism", "cost", "damage")}
        index, mechanism = entry.get("index"), entry.get("mechanism")
        if mechanism == "softmax":  # or a recurrence of the source, which stays as it is
            continue
        if index not in numbered:
            raise ValueError(f"{where}: linnet.layers has layer {index}, the model has attention in {', '.join(map(str, numbered))}")
        site = numbered[index]
        if why := attention.refusal(site, mechanism, options):
            raise ValueError(f"{where}: layer {index} cannot be {mechanism}: {why}")
        names = mixers.MIXERS[mechanism].option_names if mechanism in mixers.MIXERS else ()
        try:
            mixer = mixers.make(site.shape, mechanism, **{name: value for name, value in options.items() if name in names})
        except ValueError as problem:
            raise ValueError(f"{where}: layer {index}: {problem}") from problem
        state = {}
        for name, y in mixer.state_dict().items():
            full = f"linnet.layers.{index}.{mechanism}.{name}"
            expected.add(full)
            if tensors is None:
                continue
            if full not in tensors:
                raise ValueError(f"{where}: {full} is missing")
            if tensors[full].shape != y.shape:
                raise ValueError(f"{where}: {full} is {list(tensors[full].shape)}, expected {list(y.shape)}")
            state[name] = tensors[full].float()
        if tensors is not None:
            mixer.load_state_dict(state)
        site.mixer = mixer.to(next(site.module.parameters()).device).requires_grad_(False)
    if tensors is not None:
        for name in tensors:
            if name.startswith("linnet.layers.") and name not in expected:
                raise ValueError(f"{where}: {name} belongs to no layer of the list")


def load_converted(path, device=None):
    """The transformers model of a converted folder, on float32 weights."""
    path = pathlib.Path(path)
    config = json.loads((path / "config.json").read_text())
    if "linnet" not in config:
        raise ValueError(f"{path} is no converted model: config.json has no section linnet")
    if config["linnet"].get("format") != FORMAT:
        raise ValueError(f"{path}: linnet.format is {config['linnet'].get('format')!r}, expected {FORMAT}")
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it does not know the tensors of linnet.layers
    try:
        model = load_model(path)
    finally:
        transformers.logging.set_verbosity(level)
    sites = attention.find(model)
    tensors = {name: y for name, y in source_tensors(path).items() if name.startswith("linnet.layers.")}
    put_mixers(sites, config["linnet"]["layers"], tensors, path)
    model.linnet_sites = sites
    cache.install(model, sites)
    return model.to(device) if device else model
