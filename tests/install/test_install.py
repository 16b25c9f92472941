"""cmake --install serves programs out of the tree: find_package and pkg-config from C++, a shared and a static library from C99."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("LINNET_BUILD", ROOT / "build")).resolve()


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", folder)
    return folder


def test_cpp_example_finds_the_package(prefix, tmp_path):
    run("cmake", "-S", ROOT / "examples/cpp", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    assert run(tmp_path / "attention")
    assert "differ by" in run(tmp_path / "layer")


def test_every_operator_is_a_function(prefix, tmp_path):
    names = []
    for op in json.loads(run(prefix / "bin/linnet", "list", "--json"))["operators"]:
        name = op["name"]
        names += ["inline_attention" if name == "inline" else name, name + "_workspace"] + [name + "_backward"] * op["backward"]
    taken = "".join(f"  used += (void*)&linnet::{name} != nullptr;\n" for name in names)
    program = f"#include <linnet/linnet.h>\nint main() {{\n  int used = 0;\n{taken}  return used == {len(names)} ? 0 : 1;\n}}\n"
    (tmp_path / "program.cc").write_text(program)
    run("c++", "-std=c++20", "-w", f"-I{prefix}/include", tmp_path / "program.cc", prefix / "lib/liblinnet.a", "-lpthread", "-ldl",
        "-o", tmp_path / "program")
    run(tmp_path / "program")


def test_one_operator_links_alone(prefix, tmp_path):
    """A static program that calls delta has the recurrence's kernels and images, and nothing of another mechanism."""
    (tmp_path / "program.cc").write_text(
        "#include <linnet/linnet.h>\n"
        "int main() {\n"
        "  linnet::RecurrenceArgs args;\n"
        "  return linnet::delta(args, {}, {}).ok() ? 1 : 0;  // q is missing\n"
        "}\n"
    )
    run("c++", "-std=c++20", "-w", f"-I{prefix}/include", tmp_path / "program.cc", prefix / "lib/liblinnet.a", "-lpthread", "-ldl",
        "-Wl,--gc-sections", "-o", tmp_path / "program")
    run(tmp_path / "program")
    symbols = run("nm", "-C", "--defined-only", tmp_path / "program")
    assert re.search(r"linnet::(portable|avx2|avx512)::recurrence_forward\(", symbols)  # those that the build has
    for other in ("softmax", "monarch", "hierarchical", "features", "mamba_ssd", "distill", "linear"):
        assert f"::{other}_forward(" not in symbols, other
    images = set(re.findall(r"linnet_([a-z0-9]+)[a-z0-9_]*_begin", symbols))
    assert images <= {"recurrence", "shared"}, images


def test_every_group_of_images_is_named():
    """Images come into a static program through the source that launches them (LINNET_USES_IMAGES of src/core/cuda/driver.h)."""
    source = pathlib.Path(__file__).resolve().parents[2] / "src"
    groups = {path.relative_to(source).as_posix().removeprefix("mechanisms/").split("/")[0] for path in source.rglob("*.cu")}
    named = {name for path in source.rglob("*.cc") for name in re.findall(r"^LINNET_USES_IMAGES\((\w+)\)", path.read_text(), re.M)}
    assert groups == named


def test_prefix_is_complete(prefix, tmp_path):
    version = re.search(r'LINNET_VERSION "(.*)"', (prefix / "include/linnet/core/version.h").read_text()).group(1)
    program = "#include <linnet_c.h>\n#include <stdio.h>\n#include <string.h>\nint main(void) {\n  char text[32];\n"
    program += '  sprintf(text, "%d.%d.%d", LINNET_VERSION_MAJOR, LINNET_VERSION_MINOR, LINNET_VERSION_PATCH);\n'
    program += "  return strcmp(text, LINNET_VERSION) == 0 && strcmp(text, linnet_version()) == 0 ? 0 : 1;\n}\n"
    (tmp_path / "program.c").write_text(program)
    run("cc", "-std=c99", "-Wall", "-Wextra", "-Werror", f"-I{prefix}/include/linnet/capi", tmp_path / "program.c", f"-L{prefix}/lib", "-llinnet",
        f"-Wl,-rpath,{prefix}/lib", "-o", tmp_path / "program")
    run(tmp_path / "program")
    assert run(prefix / "bin/linnet", "--version").strip() == f"linnet {version}"
    assert f"Version: {version}\n" in (prefix / "lib/pkgconfig/linnet.pc").read_text()
    assert "Apache License" in (prefix / "share/doc/linnet/LICENSE").read_text()


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="there is no pkg-config")
def test_pkg_config(prefix, tmp_path):
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "linnet"], env={**os.environ, "PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig"},
        capture_output=True, text=True, check=True).stdout.split()
    run("c++", "-std=c++20", ROOT / "examples/cpp/attention.cc", *flags, f"-Wl,-rpath,{prefix}/lib", "-o", tmp_path / "attention")
    assert run(tmp_path / "attention")


def test_library_hands_out_namespace_linnet_alone(prefix):
    names = [line.split()[-1].partition("@")[0] for line in run("nm", "-D", "--defined-only", prefix / "lib/liblinnet.so").splitlines()]
    assert "linnet_call" in names
    # _ZSt: templates of the standard library over our types, which the compiler shares between libraries
    assert not [name for name in names if not re.match(r"linnet_|_ZZ?NK?6linnet|_ZT[VIS]N6linnet|_ZN?St.*6linnet", name)]


@pytest.mark.parametrize("libraries", [["-llinnet"], ["-l:liblinnet.a", "-lstdc++", "-lpthread", "-lm"]], ids=["shared", "static"])
def test_c_example_links(prefix, tmp_path, libraries):
    code = re.search(r"^```c\n(.*?)^```$", (ROOT / "docs/c.md").read_text(), re.MULTILINE | re.DOTALL).group(1)
    (tmp_path / "program.c").write_text(code)
    warnings = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    place = [f"-I{prefix}/include/linnet/capi", f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib"]
    run("cc", *warnings, *place, tmp_path / "program.c", *libraries, "-o", tmp_path / "program")
    assert "softmax: there is no option 'casual'" in run(tmp_path / "program")


def test_command_is_installed(prefix):
    assert "softmax_paged" in run(prefix / "bin/linnet", "list")
