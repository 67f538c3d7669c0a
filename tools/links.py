"""The links of the built documentation: ``tools/links.py build/docs`` checks each that is local.

A file that a page links to has to be there, and so has the place in it.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit


class Page(HTMLParser):
    """The links of a page, and the places that others may link to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {"", "top"}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note its link and its name."""
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.places.add(value)
            elif name in ("href", "src"):
                self.links.append(value)


def broken(folder: Path) -> list[str]:
    """The links below a folder that lead nowhere."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    found: dict[str, None] = {}
    for path, page in pages.items():
        for link in page.links:
            target, place = urldefrag(link)
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            file = (path.parent / unquote(urlsplit(target).path)).resolve() if target else path
            # A page of source names a class by its own module, which the reference need not do.
            is_source = "_modules" in path.parts
            known = None if is_source else pages.get(file)
            if not file.exists() or (known is not None and unquote(place) not in known.places):
                found[f"{path.relative_to(folder.resolve())}: {link}"] = None
    return list(found)


def main() -> int:
    """Print them; 1 if there are any."""
    (name,) = sys.argv[1:]
    if not (Path(name) / "index.html").exists():
        print(f"{name} has no index.html", file=sys.stderr)
        return 1
    links = broken(Path(name))
    for link in links:
        print(link, file=sys.stderr)
    return int(bool(links))


if __name__ == "__main__":
    sys.exit(main())
