#!/usr/bin/env python3
"""Checks the links in a built book: links.py BOOK

Each link within the book must lead to a file, and to its anchor in it. Each link to the repository must name one of its files. Each
page in docs/ must be in the book.
"""
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "https://github.com/ferrogin/ferrogin"
root = Path(__file__).resolve().parents[2]
book = Path(sys.argv[1]).resolve()


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.path, self.ids, self.links = path, set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        link = attributes.get("href") or attributes.get("src")
        if link:
            self.links.append(link)


def fault(page, link):
    """What is wrong with a link, or None."""
    url = urlsplit(link)
    if link.startswith(f"{REPOSITORY}/blob/main/"):
        path = unquote(url.path.split("/blob/main/")[1])
        return None if (root / path).exists() else "the repository has no such file"
    if url.scheme or url.netloc:
        return None
    path = (page.path.parent / unquote(url.path)).resolve() if url.path else page.path
    if not path.is_relative_to(book) or not path.is_file():
        return "the book has no such file"
    if url.fragment and path in pages and unquote(url.fragment) not in pages[path].ids:
        return "the page has no such anchor"
    return None


# The 404 page has paths relative to the web server's root, and the print page consists of the others.
files = [path for path in sorted(book.rglob("*.html")) if path.name not in ("404.html", "print.html")]
pages = {path: Page(path) for path in files}
faults = [f"{page.path.name}: {link}: {why}" for page in pages.values() for link in page.links if (why := fault(page, link))]
for page in sorted((root / "docs").glob("*.md")):
    name = {"README": "index", "SUMMARY": "toc"}.get(page.stem, page.stem)
    if book / f"{name}.html" not in pages:
        faults.append(f"docs/{page.name} is not in docs/SUMMARY.md")
count = sum(len(page.links) for page in pages.values())
for line in faults:
    print(line)
print(f"{'FAIL' if faults else 'PASS'} {count} links of {len(pages)} pages of the book")
sys.exit(bool(faults))
