#!/usr/bin/env python3
"""A preprocessor of mdBook: links to files outside docs/ become links to the repository, because the book has no such files."""
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
            chapter["content"] = re.sub(r"\]\(\.\./", f"]({repository}/blob/main/", chapter["content"])
            rewrite(chapter["sub_items"])


rewrite(book["items"])
json.dump(book, sys.stdout)
