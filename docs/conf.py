"""Sphinx configuration; ``make docs`` builds with every warning an error."""

from __future__ import annotations

import builtins
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = _PROJECT["name"]
release = version = _PROJECT["version"]
project_copyright = "the aiordma authors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

# A name in single backticks is a link if it is the name of an object, and code if it is not.
default_role = "py:obj"
nitpicky = True
#: References that may stay without a target: names in backticks, and names outside of aiordma.
nitpick_ignore_regex = [("py:obj", ".*"), ("py:.*", r"(?!aiordma\.).*")]
#: Types of results and of private attributes, type variables, the bounds of settings, and base
#: classes that programs know by their builtins.
nitpick_ignore = [
    ("py:class", name)
    for name in (
        "aiordma.datagram.endpoint.P",
        "aiordma.endpoint.connect.T",
        "aiordma.endpoint.link.Link",
        "aiordma.endpoint.notes.NoteBook",
        "aiordma.endpoint.notes.Viewed",
        "aiordma.endpoint.one_sided.OneSided",
        "aiordma.endpoint.outcome.Outcome",
        "aiordma.errors.RdmaPermissionError",
        "aiordma.errors.RdmaTimeoutError",
        "aiordma.link.settings.Between",
        "aiordma.link.settings.OneOf",
        "aiordma.link.settings.Seconds",
        "aiordma.loop.steps.Steps",
        "aiordma.memory.governor.Account",
        "aiordma.memory.cache._Use",
        "aiordma.memory.large_memory.LargeMemory",
        "aiordma.requests.served.Served",
        "aiordma.rsocket.iomap.Mapping",
        "aiordma.testing.faults._Process",
    )
]

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["aiordma.css"]
pygments_dark_style = "monokai"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Prompts and output stay behind when an example is copied; lines that go on come along.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
copybutton_here_doc_delimiter = "EOF"

_PYTHON = "docs.python.org"


def _python_inventory() -> dict[str, Any]:
    """Where the names of Python's own documentation are, if that can be reached: or no links."""
    local = sorted(Path("/usr/share/doc").glob("python3*/html/objects.inv"))
    if not local:
        try:
            socket.create_connection((_PYTHON, 443), timeout=3).close()
        except OSError:
            return {}
    return {"python": (f"https://{_PYTHON}/3", str(local[-1]) if local else None)}


intersphinx_mapping = _python_inventory()
intersphinx_timeout = 5

#: Notes for the tests that run the blocks of a page; see tests/pages.py.
_NOTE = re.compile(r"^ *<!-- (?:not )?run\b.*?-->\n", re.DOTALL | re.MULTILINE)


def _without_notes(app: Any, name: str, source: list[str]) -> None:
    source[0] = _NOTE.sub("", source[0])


#: Classes whose objects are made by a call, as their first line says; no program calls the class.
_MADE_BY_CALLS = {
    "aiordma.ConnectRequest",
    "aiordma.Connection",
    "aiordma.ConnectionEvents",
    "aiordma.Lease",
    "aiordma.Listener",
    "aiordma.datagram.transport.RdmaDatagramTransport",
    "aiordma.RdmaServer",
    "aiordma.RdmaTransport",
    "aiordma.Server",
    "aiordma.endpoint.connect.Opening",
    "aiordma.streams.iomap.MappedRegion",
    "aiordma.streams.iomap.StreamIomap",
    "aiordma.verbs.PreparedPost",
}


def _without_signature(_app: Any, _what: str, name: str, *_: Any) -> tuple[str, str] | None:
    return ("", "") if name in _MADE_BY_CALLS else None


def _builtins_are_not_ours(_app: Any, doctree: Any) -> None:
    """`bytes` in a signature is Python's, not an attribute of this name of some class."""
    for node in doctree.findall(pending_xref):
        if node.hasattr("refspecific") and hasattr(builtins, node.get("reftarget", "")):
            del node["refspecific"]  # the search for a name that ends like this


#: Words of code in a table, and where a long one may go on in the next line: before a capital
#: letter or an underscore, and behind what joins names.  Elsewhere it is broken where it has to be.
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_CODE = re.compile(r'(?<=<span class="pre">)[^<]+')
_JOINT = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=\w)(?=_[a-z])|(?<=[./:(=,\[-])(?=\w)")


def _names_break(_app: Any, _page: str, _template: str, context: dict[str, Any], _: Any) -> None:
    """A phone has room for some 40 characters, of which a name of code takes half."""

    def broken(cell: re.Match[str]) -> str:
        return _CODE.sub(lambda code: _JOINT.sub("<wbr>", code[0]), cell[0])

    if "body" in context:
        context["body"] = _CELL.sub(broken, context["body"])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", _builtins_are_not_ours)
    app.connect("autodoc-process-signature", _without_signature)
    app.connect("html-page-context", _names_break)
    app.connect("source-read", _without_notes)
