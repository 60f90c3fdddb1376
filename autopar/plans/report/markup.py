"""Build HTML and SVG text, in which every number carries its formula."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def tag(name: str, *content: str, **attributes: object) -> str:
    """Return an element. ``content`` is markup, attribute values are text; a trailing ``_`` of a name is dropped."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{''.join(content)}</{name}>"


def number(text: str, formula: str, *, focus: bool = True) -> str:
    """Return a number with its formula, which shows on hover or keyboard focus."""
    return tag("span", escape(text), class_="n", data_f=formula, tabindex=0 if focus else None)


def rows(head: Iterable[str], body: Iterable[Iterable[str]], caption: str) -> str:
    """Return a table of markup cells that scrolls sideways on narrow screens."""
    top = tag("thead", tag("tr", *(tag("th", h, scope="col") for h in head)))
    lines = (tag("tr", *(tag("td", cell) for cell in line)) for line in body)
    return tag(
        "div",
        tag("table", tag("caption", caption), top, tag("tbody", *lines)),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def section(name: str, title: str, *content: str) -> str:
    return tag("section", tag("h2", title), *content, id=name)
