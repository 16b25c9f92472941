"""What the pages, and the comments of sources, name is there: files, headings behind a link, options of the command, variables of the
environment, targets of make."""

import functools
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve()
PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in ("data", "docs", "tests") for page in sorted((ROOT / folder).rglob("*.md")))]
FOLDERS = ("cmake", "data", "docs", "examples", "python", "src", "tests", "tools")
SOURCES = [ROOT / "Makefile", ROOT / "CMakeLists.txt", ROOT / ".ci" / "run", *(
    path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".cc", ".cmake", ".cu", ".cuh", ".h", ".py", ".sh") and path != pathlib.Path(__file__).resolve())]  # fmt: skip
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path):
    return str(path.relative_to(ROOT))


@functools.cache
def headings(page):
    """The anchors of a page's headings, as GitHub makes them."""
    made = set()
    for text in re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).strip().lower()).replace(" ", "-")
        made.add(next(each for each in [plain, *(f"{plain}-{i}" for i in range(1, 99))] if each not in made))
    return made


def dead_links(page, text):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in headings(target)):
            dead.append(link)
    return dead


def missing_files(text):
    named = re.findall(rf"(?<![\w./<\"-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text)
    return [path for path in named if not (ROOT / path).exists()]


@functools.cache
def options():
    """Of every command, by its own --help."""
    help_of = lambda *words: subprocess.run([BUILD / "linnet", *words, "--help"], capture_output=True, text=True, check=True).stdout  # noqa: E731
    commands = re.findall(r"^  (\w+)  ", help_of().partition("linnet COMMAND --help")[0], re.MULTILINE)
    return {command: {"help", *re.findall(r"^ +--([a-z][a-z-]*)", help_of(command), re.MULTILINE)} for command in commands}


def unknown_options(text):
    found = re.findall(rf"\blinnet ({'|'.join(options())})\b([^`|;&#\n]*)", text)
    return [f"{command} --{name}" for command, words in found for name in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", words)
            if name not in options()[command]]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_names_what_is_there(page):
    text = page.read_text()
    assert not dead_links(page, text)
    if not page.name.startswith("2026-"):  # a run as it was, with the names of its day
        assert not missing_files(text)
        assert not unknown_options(text)


@pytest.mark.parametrize("folder", sorted({name_of(path.parent) for path in SOURCES}))
def test_sources_name_what_is_there(folder):
    for path in (path for path in SOURCES if name_of(path.parent) == folder):
        text = path.read_text()
        missing = missing_files(text)
        assert not missing, (name_of(path), missing)
        assert not unknown_options(text), name_of(path)


def test_variables_and_targets():
    """Variables of the environment that pages name are read somewhere; `make TARGET` in a block of code has its rule."""
    code = "\n".join(path.read_text() for path in SOURCES)
    makefile = (ROOT / "Makefile").read_text()
    rules = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    seen = [0, 0]
    for page in PAGES:
        for variable in set(re.findall(r"\bLINNET_[A-Z_0-9]*[A-Z0-9]\b", page.read_text())):
            seen[0] += 1
            assert variable in code, (name_of(page), variable)
        for target in re.findall(r"(?:^|`|^    )make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE):
            seen[1] += 1
            assert target in rules, (name_of(page), target)
    assert min(seen) > 10


def test_what_is_not_there_is_found():
    page = ROOT / "docs" / "index.md"
    assert dead_links(page, "[a](nowhere.md) [b](api.md#nowhere) [c](#nowhere) [d](api.md#letters) [e](../README.md)") == [
        "nowhere.md", "api.md#nowhere", "#nowhere"]  # fmt: skip
    assert missing_files("`src/nowhere.cc`, src/core/op.h and (tools/nowhere.py)") == ["src/nowhere.cc", "tools/nowhere.py"]
    assert unknown_options("build/linnet list --layers; `linnet list --json`") == ["list --layers"]
    assert len(PAGES) > 100 and len(SOURCES) > 500
