#!/usr/bin/env python3
"""The articles of a Wikipedia dump (enwik8) as plain text: what a model that reads prose is fitted on.

    tools/plain_wiki.py ~/.cache/linnet/enwik8/enwik8 --bytes 40000000 > wiki.txt

Tables, templates, references, links' targets and what is no article (redirects, pages of a name space) are left out; headings stay as
lines of their own. Articles are parted by an empty line with a heading of one '=', as `linnet convert` cuts documents.
"""

import argparse
import html
import pathlib
import re
import sys

PAGE = re.compile(r"<page>\s*<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
SPACES = ("Wikipedia:", "Talk:", "Template:", "Image:", "Category:", "Portal:", "Help:", "User:", "MediaWiki:")
LEAST = 500  # characters of an article


def innermost(pattern, text):
    """Nested marks are taken out from the innermost to the outermost."""
    while True:
        shorter = re.sub(pattern, "", text)
        if shorter == text:
            return text
        text = shorter


def plain(text):
    text = html.unescape(html.unescape(text))
    text = re.sub(r"<!--.*?-->|<ref[^>]*/>|<(ref|math|gallery|timeline|table|pre|code|nowiki)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = innermost(r"\{\{[^{}]*\}\}", text)
    text = innermost(r"\{\|[^{}]*?\|\}", text)
    text = innermost(r"(?i)\[\[(?:image|file|category|[a-z]{2,3}|[a-z]{2,3}-[a-z]+|simple):[^\[\]]*\]\]", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[(?:https?|ftp)://[^\s\]]+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^<>]*>|'{2,}|__[A-Z]+__", "", text)
    lines = []
    for line in text.split("\n"):
        line = line.strip()
        heading = re.fullmatch(r"(={2,5})\s*(.*?)\s*=+", line)
        if heading:
            lines.append(f"\n{heading[2]}\n")
        elif len(line) > 40 and line[0] not in "|!{}":  # not the rest of a table, and not one of many short entries
            lines.append(re.sub(r"^[*#:;]+\s*", "", line))
    # Headings of which nothing is left go, too.
    kept = [line for i, line in enumerate(lines) if not line.startswith("\n") or (i + 1 < len(lines) and not lines[i + 1].startswith("\n"))]
    return re.sub(r"[ \t]+", " ", "\n".join(kept)).strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump")
    parser.add_argument("--bytes", type=int, default=10**12, help="of plain text (all)")
    parser.add_argument("--skip", type=int, default=0, help="bytes of plain text that are left out before (0)")
    options = parser.parse_args()
    written = skipped = 0
    for title, text in PAGE.findall(pathlib.Path(options.dump).read_text(encoding="utf-8")):
        if title.startswith(SPACES) or text.lstrip().lower().startswith("#redirect"):
            continue
        article = plain(text)
        if len(article) < LEAST:
            continue
        article = f"= {html.unescape(title)} =\n\n{article}\n\n"
        size = len(article.encode())
        if skipped < options.skip:
            skipped += size
            continue
        sys.stdout.write(article)
        written += size
        if written >= options.bytes:
            return


if __name__ == "__main__":
    main()
