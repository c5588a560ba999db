#!/usr/bin/env python3
"""A preprocessor of mdBook. Links to files outside docs/ become links to the repository, because the book has no such files. docs/README.md is
the page index.html, and mdBook changes no link with an anchor to it. Blocks of CUDA get the colours of C++."""
import json
import re
import sys

if len(sys.argv) > 1:  # "supports RENDERER"
    sys.exit(0)
context, book = json.load(sys.stdin)
repository = context["config"]["output"]["html"]["git-repository-url"]


def rewrite(items):
    for item in items:
        if "Chapter" in item:
            chapter = item["Chapter"]
            content = re.sub(r"\]\(\.\./", f"]({repository}/blob/main/", chapter["content"])
            chapter["content"] = content.replace("](README.md", "](index.md").replace("\n```cuda\n", "\n```cpp\n")
            rewrite(chapter["sub_items"])


rewrite(book["items"])
json.dump(book, sys.stdout)
