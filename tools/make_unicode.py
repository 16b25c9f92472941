"""Writes src/runtime/tokenizer/unicode_tables.cc: which code points are letters, numbers, spaces, marks, ..., for the tokenisers.

    python tools/make_unicode.py > src/runtime/tokenizer/unicode_tables.cc

The tokenisers promise the tokens of the `tokenizers` package, whose parts follow different versions of Unicode: its regular
expressions, its digits and its BERT rules each know other code points. So each of them is asked about every code point.
"""

import struct
import unicodedata

import regex
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
LETTER, NUMBER, DIGIT, SPACE, MARK, REMOVED, PUNCTUATION, WORD = (1 << i for i in range(8))


def matching(pattern: str) -> set[int]:
    split = pre_tokenizers.Split(Regex(pattern), behavior="removed")
    found = set()
    for begin in range(0, len(POINTS), 4096):
        part = POINTS[begin : begin + 4096]
        kept = set()
        for _, (first, last) in split.pre_tokenize_str("".join(map(chr, part))):
            kept.update(range(first, last))
        found.update(c for i, c in enumerate(part) if i not in kept)
    return found


def normalized(normalizer) -> dict[int, str]:
    return {c: normalizer.normalize_str("\u4e00" + chr(c) + "\u4e00")[1:-1] for c in POINTS}


def bert(**options) -> dict[int, str]:
    switches = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}
    return normalized(normalizers.BertNormalizer(**(switches | options)))


def pieces(pre_tokenizer, c: int) -> int:
    return len(pre_tokenizer.pre_tokenize_str("a" + chr(c) + "a"))


def touching() -> set[int]:
    """What keeps a token that must be a word of its own from being found."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.add_tokens([AddedToken("zz", single_word=True, normalized=False)])
    word = tokenizer.token_to_id("zz")
    return {c for c in POINTS if word not in tokenizer.encode(chr(c) + "zz").ids}


def flags() -> dict[int, int]:
    flag = dict.fromkeys(POINTS, 0)
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.BertPreTokenizer()
    sets = {
        LETTER: matching(r"\p{L}"),
        NUMBER: matching(r"\p{N}"),
        SPACE: matching(r"\s"),
        DIGIT: {c for c in POINTS if pieces(digits, c) == 3},
        MARK: {c for c, text in bert(strip_accents=True).items() if text == ""},
        REMOVED: {c for c, text in bert(clean_text=True).items() if text == ""},
        PUNCTUATION: {c for c in POINTS if pieces(words, c) == 3},
        WORD: touching(),
    }
    for bit, points in sets.items():
        for c in points:
            flag[c] |= bit
    return flag


def knows_class(c: int) -> bool:
    """Whether the normaliser sorts c by its combining class."""
    nfd = normalizers.NFD()
    if unicodedata.combining(chr(c)) > 1:
        text = chr(c) + "\u0334"  # class 1
    else:
        text = "\u0301" + chr(c)  # class 230
    return nfd.normalize_str(text) != unicodedata.normalize("NFD", chr(c)) + "\u0334" and nfd.normalize_str(text) != text


def print_numbers(name: str, kind: str, comment: str, numbers: list[str]) -> None:
    print(f"\n// {comment}\nconst {kind} {name}[] = {{")
    line = "   "
    for number in numbers:
        if len(line) + len(number) + 2 > 128:
            print(line)
            line = "   "
        line += f" {number},"
    print(line)
    print(f"}};\nconst int {name}_count = {len(numbers)};")


def joining() -> set[int]:
    """What makes one cluster with the letter before it: a precompiled map of A takes such a cluster for an A."""
    units = [0] * 512  # a double array of one sequence: its root at 0, A at 256 ^ 65, its value at 384
    units[0], units[256 ^ 65], units[384] = 256 << 10, (256 ^ 65 ^ 384) << 10 | 1 << 8 | 65, 1 << 31
    data = struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + b"x\0"
    made = normalizers.Precompiled(data)
    return {c for c in POINTS if made.normalize_str("A" + chr(c)) == "x"}


def print_clusters() -> None:
    """How a code point stands in a cluster (what a reader takes for one character), as far as clusters of two short ones go."""
    joins, prepend, control = joining(), regex.compile(r"\p{GCB=Prepend}"), regex.compile(r"\p{GCB=Control}|\p{GCB=CR}|\p{GCB=LF}")
    rows, last = [], 0
    for c in POINTS:
        value = 1 if c in joins else 2 if prepend.match(chr(c)) else 3 if control.match(chr(c)) else 0
        if value != last:
            rows.append(f"{value << 24 | c:#x}")
            last = value
    print_numbers("kClusters", "uint32_t", "1 joins what is before it, 2 what is behind it, 3 neither << 24 | the first code point of a run", rows)


def main() -> None:
    print("// Made by tools/make_unicode.py: the code points that the tokenizers package treats alike.")
    print("// clang-format off")
    print('#include "runtime/tokenizer/unicode_tables.h"\n\nnamespace linnet::unicode {')
    flag, runs, last = flags(), [], None
    for c in POINTS:
        if flag[c] != last:
            runs.append(f"{flag[c] << 24 | c:#x}")
            last = flag[c]
    print_numbers("kRuns", "uint32_t", "flags << 24 | the first code point of a run; it ends where the next begins", runs)

    lower, runs = [], []
    for c, text in normalized(normalizers.Lowercase()).items():
        if text != chr(c) and len(text) == 1:
            lower.append((c, ord(text) - c))
    for c, delta in lower:
        if runs and runs[-1][3] == delta and c - runs[-1][1] in ((runs[-1][2],) if runs[-1][2] else (1, 2)):
            runs[-1][2] = c - runs[-1][1]
            runs[-1][1] = c
        else:
            runs.append([c, c, 0, delta])
    print_numbers("kLower", "LowerRun", "first, last, step, what is added for lower case",
                  [f"{{{a:#x}, {b:#x}, {step or 1}, {d}}}" for a, b, step, d in runs])

    nfd, nfc = normalized(normalizers.NFD()), normalizers.NFC()
    rows = []
    for c, text in nfd.items():
        if text == chr(c) or 0xAC00 <= c <= 0xD7A3:
            continue
        parts = [int(p, 16) for p in unicodedata.decomposition(chr(c)).split()]
        composes = len(parts) == 2 and nfc.normalize_str(chr(c)) == chr(c)
        rows.append(f"{{{c:#x}, {parts[0]:#x}, {parts[1] if len(parts) == 2 else 0:#x}, {int(composes)}}}")
    print_numbers("kDecompositions", "Decomposition", "code point, its one or two parts, whether the parts compose again", rows)

    rows, last = [], 0
    for c in POINTS:
        value = unicodedata.combining(chr(c))
        if value and not knows_class(c):
            value = 0
        if value != last:
            rows.append(f"{value << 24 | c:#x}")
            last = value
    print_numbers("kClasses", "uint32_t", "combining class << 24 | the first code point of a run", rows)
    print_clusters()
    print("\n}  // namespace linnet::unicode")


if __name__ == "__main__":
    main()
