"""Tokenisers against the tokenizers package, token for token."""

import base64
import json
import random
import re
import struct

import numpy
import pytest
from runtime_cases import MINILM, SMOLLM2, need, runtime, wikitext
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEXT = [
    "The quick brown fox jumps over the lazy dog's 1234 tails; it isn't as if we'll ever know, they've said.",
    "Größe, naïve café, Ελληνικά Σίσυφος, русский язык, 中文字符和标点。日本語テキスト、한국어 문장",
    "def f(x):\n    return x ** 2  # squares\n\n\tif x:\r\n        pass\n",
    "\u0130stanbul I\u0307 \u1e9e \u017f 's 'S 'LL 'Ve \u212a e\u0301 a\u0328\u0301 \u1100\u1161\u11a8 \ufdfa \U0001f469\u200d\U0001f680",
]
INTERESTING = (
    " \t\n\r\x0b\x0c\x85\xa0\u2003\u3000\u200b\u202f'’sStTrReEvVmMlLdD0123456789²½Ⅷ٣ aAzZéÉßẞſK\u0130\u0131_-.,;:!?()[]<>|#"
    "\u0301\u0308\u0327\u0345\u05b0\u0e31中文字日本語かなカナ한국어\u1100\u1161\u11a8\U0001f600\U0001f469\u200d\ufffd\ufeff\x00\x07Σσς"
    "\u1e00\u0958\u2126\U0001d400\U00020000\U000e0001\u0378\ue000"
)


def pre_tokenizer(kind):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt2", "smollm"))
    if kind == "gpt2":
        return level
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    pattern = LLAMA3 if kind == "llama3" else QWEN2
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


def byte_pair(kind, tmp_path):
    made = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    made.pre_tokenizer = pre_tokenizer(kind)
    made.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|start|>"], show_progress=False)
    made.train_from_iterator(TEXT * 3, trainer)
    made.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("<tool> x", normalized=False, lstrip=True, rstrip=True), "\u0132j"])
    made.add_tokens([AddedToken("word", single_word=True, normalized=False)])
    if kind == "llama3":
        made.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 1)])
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return made, path


def character_pairs(kind, tmp_path):
    """Llama 2 as converted before 2024 and since, Gemma, and a Metaspace tokeniser without byte fallback."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=kind != "metaspace"))
    prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    made.normalizer = {"llama": normalizers.Sequence([prepend, replace]), "gemma": replace}.get(kind) or made.normalizer
    if kind in ("first", "metaspace"):
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first" if kind == "first" else "always", split=kind == "metaspace")
    if kind == "metaspace":
        made.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    else:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence(steps if kind == "gemma" else [*steps, decoders.Strip(" ", 1, 0)])
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256) if kind != "metaspace"]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, limit_alphabet=60, initial_alphabet=["▁"],
                                  show_progress=False)
    made.train_from_iterator([word for text in TEXT * 3 for word in text.split()] if kind != "metaspace" else TEXT * 3, trainer)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    described = json.loads(path.read_text())  # bytes are tokens of the model alone
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["content"].startswith("<0x")]
    described["post_processor"] = json.loads(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]).__getstate__())
    path.write_text(json.dumps(described))
    made = Tokenizer.from_file(str(path))
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("word", single_word=True, normalized=False)])
    made.save(str(path))
    return made, path


@pytest.mark.parametrize("kind", ["llama", "first", "gemma", "metaspace"])
def test_character_pairs_of_random_texts(kind, tmp_path):
    reference, path = character_pairs(kind, tmp_path)
    ours = runtime.Tokenizer(path)
    compare(reference, ours, TEXT)
    compare(reference, ours, ["", " ", "  a", "▁a ▁", "a" * 3000, "<s>a b", "<tool>", " <tool> x"])
    compare(reference, ours, random_texts(2000))
    for text in TEXT:
        ids = reference.encode(text).ids
        assert ours.decode(ids) == reference.decode(ids)


def characters_map(table):
    """A precompiled_charsmap of {sequence: text}: a double array in which every node has a block of 256 units of its own."""
    texts, offsets = b"", {}
    for sequence, text in table.items():
        offsets[sequence.encode()] = len(texts)
        texts += text.encode() + b"\0"
    nodes = sorted({key[:n] for key in offsets for n in range(len(key) + 1)}, key=lambda key: (len(key), key))
    place = {b"": 0}
    units = [0] * (256 * (len(nodes) + 1))
    base = {node: 256 * (i + 1) for i, node in enumerate(nodes)}  # children of a node stand at its base ^ byte
    for node in nodes:
        if node:
            place[node] = base[node[:-1]] ^ node[-1]
        offset = place[node] ^ base[node]
        encoded = (offset << 10) if offset < 1 << 21 else (offset >> 8) << 10 | 1 << 9
        assert offset < 1 << 21 or offset % 256 == 0
        units[place[node]] = encoded | (1 << 8 if node in offsets else 0) | (node[-1] if node else 0)
        if node in offsets:
            units[base[node]] = offsets[node] | 1 << 31
    data = struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts
    return base64.b64encode(data).decode()


MAP = {"\t": " ", "\n": " ", "\r": " ", "\u00a0": " ", "\u3000": " ", "\u200b": "", "\u200d": " ", "e\u0301": "é", "\ufb01": "fi", "Å": "Å", "\u0345": "ι",
       "½": "1⁄2", "²": "2", "한": "han", "A": "a", "s": "s", "\U0001d400": "A", "\ufdfa": "صلى الله عليه وسلم", "'": "’"}  # fmt: skip


def unigram(kind, tmp_path):
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<pad>", "</s>", "<unk>"] + [f"<0x{b:02X}>" for b in range(256) if kind == "bytes"],
                                      unk_token="<unk>", show_progress=False)  # fmt: skip
    made.train_from_iterator(TEXT * 5, trainer)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    described = json.loads(path.read_text())
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first" if kind == "first" else "always", "split": kind != "whole"}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]} if kind == "roberta" else metaspace
    described["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]} if kind == "bytes" else metaspace
    precompiled = {"type": "Precompiled", "precompiled_charsmap": characters_map(MAP)}
    squeeze = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " " if kind == "roberta" else "▁"}
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    quotes = {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}
    described["normalizer"] = {
        "t5": {"type": "Sequence", "normalizers": [precompiled, strip, squeeze]},
        "roberta": {"type": "Sequence", "normalizers": [precompiled, squeeze]},
        "first": {"type": "Sequence", "normalizers": [quotes, {"type": "NFC"}, {"type": "Lowercase"}, precompiled]},
    }.get(kind, precompiled)
    described["model"]["byte_fallback"] = kind == "bytes"
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["content"].startswith("<0x")]
    described["post_processor"] = json.loads(processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)]).__getstate__())
    path.write_text(json.dumps(described))
    made = Tokenizer.from_file(str(path))
    made.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    made.save(str(path))
    return made, path


@pytest.mark.parametrize("kind", ["t5", "roberta", "first", "whole", "bytes"])
def test_unigrams_of_random_texts(kind, tmp_path):
    reference, path = unigram(kind, tmp_path)
    ours = runtime.Tokenizer(path)
    compare(reference, ours, TEXT)
    compare(reference, ours, ["", " ", "  a  ", "▁a ▁", "a" * 3000, "a <mask> b", "e\u0301 e\u0301\u0301 \r\n x\u0301", "x ``a``", "<unk> </s>"])
    compare(reference, ours, random_texts(2000))
    for text in TEXT:
        ids = reference.encode(text).ids
        assert ours.decode(ids) == reference.decode(ids)


def test_unigram_files_that_are_wrong(tmp_path):
    _, path = unigram("t5", tmp_path)
    good = json.loads(path.read_text())
    for change, sentence in [
        (lambda d: d["model"].update(unk_id=10**6), "unk_id is 1000000, expected a token"),
        (lambda d: d["model"]["vocab"].insert(3, ["a"]), "token 3 is"),
        (lambda d: d["normalizer"]["normalizers"][0].update(precompiled_charsmap="!!"), "not in base 64"),
        (lambda d: d["normalizer"]["normalizers"][0].update(precompiled_charsmap="/////w=="), "double array of"),
        (lambda d: d.update(normalizer={"type": "NFKD"}), "normaliser \"NFKD\", expected Precompiled"),
        (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokeniser \"Whitespace\", expected Metaspace"),
    ]:
        bad = json.loads(json.dumps(good))
        change(bad)
        path.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=re.escape(sentence)):
            runtime.Tokenizer(path)


def test_scored_pairs_of_a_gguf_file(tmp_path):
    """SentencePiece's tokens with scores: the merges they stand for, as transformers' converter lists them."""
    import gguf

    reference, _ = character_pairs("llama", tmp_path)
    vocabulary = sorted(reference.get_vocab().items(), key=lambda item: item[1])
    vocabulary = [(token, i) for token, i in vocabulary if token not in ("<tool>", "word")]
    order = {left + right: rank for rank, (left, right) in enumerate(json.loads(reference.to_str())["model"]["merges"])}
    writer = gguf.GGUFWriter(tmp_path / "scored.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_scores([-float(order.get(token, 100000)) for token, _ in vocabulary])
    writer.add_token_types([2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 1 for _, i in vocabulary])
    writer.add_bos_token_id(1)
    writer.add_tensor("unused", numpy.zeros(32, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = runtime.Tokenizer(tmp_path / "scored.gguf")
    pairs = {}
    for token, _ in vocabulary[259:]:
        for at in range(1, len(token)):
            if reference.token_to_id(token[:at]) is not None and reference.token_to_id(token[at:]) is not None:
                pairs.setdefault(order.get(token, 100000), []).append((token[:at], token[at:]))
    assert pairs
    for text in [*TEXT[:1], "a linnet sings", "the quick the lazy"]:
        assert ours.decode(ours.encode(text)) == text
        assert ours.encode(text)[0] == 1
        assert ours.encode(text) == reference.encode(text).ids


def word_piece(tmp_path, **options):
    made = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
    made.normalizer = normalizers.BertNormalizer(**options)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False))
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return made, path


def random_texts(count, seed=0):
    r = random.Random(seed)
    pieces = ["<|end|>", "<|start|>", "<tool>", "<tool> x", "word", "[CLS]", " the", "'re", "\r\n", "  ", "1234567", "<|im_end|>"]
    for _ in range(count):
        text = ""
        for _ in range(r.randint(0, 24)):
            choice = r.random()
            if choice < 0.6:
                text += r.choice(INTERESTING)
            elif choice < 0.75:
                text += r.choice(pieces)
            elif choice < 0.9:
                text += chr(r.randint(0x20, 0x2FFF))
            else:
                point = r.randint(0, 0x10FFFF)
                text += chr(point) if not 0xD800 <= point <= 0xDFFF else "\ue000"
        yield text


def compare(reference, ours, texts):
    for text in texts:
        assert ours.encode(text) == reference.encode(text).ids, repr(text)
        assert ours.encode(text, add_special=False) == reference.encode(text, add_special_tokens=False).ids, repr(text)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "smollm"])
def test_byte_pairs_of_random_texts(kind, tmp_path):
    reference, path = byte_pair(kind, tmp_path)
    ours = runtime.Tokenizer(path)
    compare(reference, ours, TEXT)
    compare(reference, ours, random_texts(3000))
    compare(reference, ours, ["a" * 3000 + "1" * 500, "'" * 100, " " * 77 + "x", "\n" * 50])
    for text in TEXT:
        ids = reference.encode(text).ids
        assert ours.decode(ids) == reference.decode(ids)
        assert ours.decode(ids[:-1], skip_special=False) == reference.decode(ids[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("options", [{}, {"lowercase": False}, {"lowercase": False, "strip_accents": True}, {"strip_accents": False},
                                     {"clean_text": False, "handle_chinese_chars": False}])  # fmt: skip
def test_word_pieces_of_random_texts(options, tmp_path):
    reference, path = word_piece(tmp_path, **options)
    ours = runtime.Tokenizer(path)
    compare(reference, ours, TEXT)
    compare(reference, ours, random_texts(3000))
    ids = reference.encode(TEXT[0]).ids
    assert ours.decode(ids) == reference.decode(ids)


def test_every_code_point_alone_and_between_letters(tmp_path):
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    texts = [f"a{c}{c} {c}1" for c in points[:0x3400:3]] + ["a" + "a".join(points[i : i + 64]) for i in range(0x3000, len(points), 4096)]
    for kind in ["gpt2", "qwen2", "smollm"]:
        reference, path = byte_pair(kind, tmp_path)
        compare(reference, runtime.Tokenizer(path), texts)
    reference, path = word_piece(tmp_path)
    compare(reference, runtime.Tokenizer(path), texts)


def smollm2_reference():
    import gguf

    fields = gguf.GGUFReader(need(SMOLLM2)).fields
    tokens, merges = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.merges"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges])
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizer("smollm")
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == 3])
    return made


def test_smollm2_on_wikitext():
    reference, ours = smollm2_reference(), runtime.Tokenizer(SMOLLM2)
    text = wikitext()
    assert ours.encode(text) == reference.encode(text).ids
    compare(reference, ours, random_texts(2000, seed=1))
    ids = ours.encode(text[:20000])
    assert ours.decode(ids) == text[:20000]


def test_minilm_on_wikitext():
    reference = Tokenizer.from_file(str(need(MINILM / "tokenizer.json")))
    reference.no_truncation()
    reference.no_padding()
    ours = runtime.Tokenizer(MINILM)
    lines = wikitext().splitlines()
    compare(reference, ours, lines[:1500])
    compare(reference, ours, random_texts(2000, seed=2))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('"type":"BPE"', '"type":"WordLevel"'), "model of type \"WordLevel\", expected BPE, Unigram or WordPiece"),
        (('"byte_fallback":false', '"byte_fallback":true'), "expected none or Metaspace"),
        (('"use_regex":true', '"use_regex":false'), "without byte-level words"),
        (('"normalizer":null', '"normalizer":{"type":"NFKC"}'), "normaliser \"NFKC\""),
        (('"Ġ"', '"Ġ Ġ"'), "merge"),
        (('"version"', '"version'), "tokenizer.json"),
    ],
)
def test_what_a_file_may_not_ask_for(change, sentence, tmp_path):
    _, path = byte_pair("gpt2", tmp_path)
    text = re.sub(r"\s*\n\s*", "", path.read_text()).replace('": ', '":')
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        runtime.Tokenizer(path)
