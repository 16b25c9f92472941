"""Every example in the README and in docs/ runs: Python blocks are executed page by page, C++ blocks with a main() are compiled
against the built library and run, and each line of a shell block that calls `build/linnet` must exit 0."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    found = []
    for page in PAGES:
        if not page.exists():
            continue
        for number, match in enumerate(FENCE.finditer(page.read_text())):
            if match.group(1) == language:
                found.append(pytest.param(match.group(2), id=f"{page.relative_to(ROOT)}#{number}"))
    return found


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("page", [p for p in PAGES if p.exists()], ids=lambda p: str(p.relative_to(ROOT)))
def test_python(page):
    code = [m.group(2) for m in FENCE.finditer(page.read_text()) if m.group(1) == "python"]
    namespace = {"__name__": "example"}
    for block in code:
        exec(compile(block, str(page), "exec"), namespace)  # one namespace per page: later blocks build on earlier ones


@pytest.mark.parametrize("code", blocks("cpp"))
def test_cpp(code, tmp_path):
    if "int main" not in code:
        pytest.fail("a C++ example is a whole program with main(), so that it can be compiled and run")
    # <linnet/linnet.h> as an installed tree has it.
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "linnet").symlink_to(ROOT / "src")
    source = tmp_path / "example.cc"
    source.write_text(code)
    program = tmp_path / "example"
    run(["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", tmp_path / "include", source, BUILD / "liblinnet.a", "-lpthread", "-o", program])
    run([program])


@pytest.mark.parametrize("code", blocks("c"))
def test_c(code, tmp_path):
    source = tmp_path / "example.c"
    source.write_text(code)
    program = tmp_path / "example"
    run(["gcc", "-std=c99", "-I", ROOT / "src" / "capi", source, BUILD / "liblinnet.a", "-lstdc++", "-lpthread", "-lm", "-o", program])
    run([program])


@pytest.mark.parametrize("code", blocks("sh"))
def test_command(code, tmp_path):
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "build/linnet":
            (tmp_path / "tests").exists() or (tmp_path / "tests").symlink_to(ROOT / "tests")
            (tmp_path / "data").exists() or (tmp_path / "data").symlink_to(ROOT / "data")
            run([BUILD / "linnet", *words[1:]], cwd=tmp_path)


def test_every_mechanism_has_a_page():
    operators = json.loads(run([BUILD / "linnet", "list", "--json"]))["operators"]
    without = {op["mechanism"] for op in operators if not (ROOT / "docs" / "mechanisms" / f"{op['mechanism']}.md").exists()}
    assert not without


USER_PAGES = [page for page in PAGES if page.exists() and not {"notes", "results"} & set(page.relative_to(ROOT).parts)]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_users_page_can_be_read_in_one_sitting(page):
    """How something was made fast belongs to docs/notes."""
    assert len(page.read_text().split()) <= 4500


def test_every_page_is_led_to():
    """From docs/index.md a reader comes to every page."""
    seen, todo = set(), [ROOT / "docs" / "index.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", FENCE.sub("", page.read_text())):
            target = (page.parent / link).resolve()
            todo += sorted(target.glob("*.md")) if target.is_dir() else [target]
    assert {page for page in PAGES if page.exists()} <= seen


def test_every_mechanism_is_in_the_decision_table():
    text = (ROOT / "docs" / "which.md").read_text()
    table = re.search(r"^\| mechanism .*?\n\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL).group(0)
    names = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) - {"recurrence"} | {"decay", "gla", "delta", "gated_delta"}
    assert len(names) > 15 and not [name for name in sorted(names) if f"| `{name}`" not in text]


def test_api_reference_is_current(tmp_path):
    """tools/make_reference.py api build/liblinnet.so docs writes it anew."""
    run([sys.executable, ROOT / "tools" / "make_reference.py", "api", BUILD / "liblinnet.so", tmp_path])
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.md")}
    kept = {page: (ROOT / "docs" / page).read_text() for page in made if (ROOT / "docs" / page).exists()}
    assert kept == made, "run tools/make_reference.py api build/liblinnet.so docs"
