#!/usr/bin/env python3
"""An mdBook preprocessor. Links to files outside docs/ become links to the repository, because the book doesn't have those files.
docs/README.md becomes index.html, and mdBook doesn't rewrite links to it that have an anchor. CUDA code blocks are highlighted as C++."""
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
