"""Plain text out of the four markup forms of the corpus: reStructuredText, AsciiDoc, DocBook HTML and rendered man pages.

Every function takes the text of one file and returns plain text that keeps paragraphs, lists and code, and drops what
only a formatter needs. They are deliberately lossy: the aim is text a small language model can learn, not conversion.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

_RST_DROPPED = re.compile(
    r"\.\. (?:_[^:]*:|(?:module|moduleauthor|sectionauthor|index|highlight|currentmodule|testsetup|testcleanup|"
    r"toctree|contents|only|audit-event|tabularcolumns|include|literalinclude|image|figure|raw|rst-class|"
    r"program|role|default-role|availability|impl-detail)::|[^ :]+$|%|\|)"
)
_RST_NOTICES = {
    "versionadded": "New in version",
    "versionchanged": "Changed in version",
    "deprecated": "Deprecated since version",
    "deprecated-removed": "Deprecated since version",
    "note": "Note:",
    "warning": "Warning:",
    "seealso": "See also:",
    "tip": "Tip:",
    "caution": "Caution:",
}
_RST_DIRECTIVE = re.compile(r"^(\s*)\.\. ([\w:-]+?)::\s*(.*)$")
_RST_OPTION = re.compile(r"^\s+:[\w-]+:(?:\s|$)")
_LITERAL_STAR = "\0"  # stands for an escaped star while emphasis is removed
_BLANK_LINES = re.compile(r"\n{3,}")


def rst_inline(text: str) -> str:
    """Replace roles, literals, emphasis and links of reStructuredText by the words they show."""
    text = re.sub(r":[\w:+-]+:`([^`<]+?)\s*<[^`>]*>`", r"\1", text)
    text = re.sub(r":(?:pep):`(\d+)`", r"PEP \1", text)
    text = re.sub(r":[\w:+-]+:`~(?:[\w.]*\.)?([^`]+)`", r"\1", text)
    text = re.sub(r":[\w:+-]+:`!?([^`]+)`", r"\1", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`__?", r"\1", text)
    text = re.sub(r"\*((?:\\\*)+)(\w+)\*", lambda match: match[1].replace("\\*", _LITERAL_STAR) + match[2], text)
    text = text.replace("\\*", _LITERAL_STAR)
    text = re.sub(r"\*\*([^*\n]+)\*\*", r"\1", text)
    text = re.sub(r"(?<![\w*])\*([\w][^*\n]*)\*(?!\*)", r"\1", text)
    return text.replace(_LITERAL_STAR, "*").replace("\\ ", "").replace("::\n", ":\n")


def _rst_line(line: str) -> str | None:
    """Return one line of reStructuredText as plain text, or None where the line is for the formatter only."""
    directive = _RST_DIRECTIVE.match(line)
    if directive is None:
        return None if _RST_DROPPED.match(line.strip()) or _RST_OPTION.match(line) else line
    indent, name, argument = directive.groups()
    if name in _RST_NOTICES:
        return f"{indent}{_RST_NOTICES[name]} {argument}".rstrip()
    if name in {"code-block", "doctest", "testcode", "testoutput", "productionlist", "rubric", "list-table", "table"}:
        return None
    if _RST_DROPPED.match(line.strip()):
        return None
    return f"{indent}{argument}" if argument else None


def clean_rst(text: str) -> str:
    """Return a reStructuredText file of the Python manual as plain text."""
    lines = [kept for line in text.splitlines() if (kept := _rst_line(line)) is not None]
    return tidy(rst_inline("\n".join(lines)))


def clean_asciidoc(text: str) -> str:
    """Return an AsciiDoc file of git's documentation as plain text."""
    text = re.sub(r"^(?:ifdef|ifndef|endif|include|ifeval)::.*$", "", text, flags=re.MULTILINE)
    text = re.sub(
        r"^\[(?:\[.*\]|verse|NOTE|WARNING|TIP|quote.*|options.*|attributes|horizontal)\]$", "", text, flags=re.M
    )
    text = re.sub(r"link(?:git)?:([\w.-]+)\[(\d)\]", r"\1(\2)", text)
    text = re.sub(r"link:[^\[\s]+\[([^\]]*)\]", r"\1", text)
    text = re.sub(r"<<[^,>]+,([^>]+)>>", r"\1", text)
    text = re.sub(r"\{(?:apostrophe|litdd|plus|tilde|caret|asterisk|startsb|endsb)\}", "", text)
    return tidy(re.sub(r"^\+$", "", text, flags=re.MULTILINE))


def clean_man(rendered: str) -> str:
    """Return a man page rendered for a terminal without overstrikes and without the first and last line (head, foot)."""
    lines = re.sub(r".\x08", "", rendered).splitlines()
    filled = [number for number, line in enumerate(lines) if line.strip()]
    if len(filled) > 2:
        lines = lines[filled[0] + 1 : filled[-1]]
    return tidy("\n".join(lines))


_LINE_BREAKS = {"p": 2, "pre": 2, "h1": 2, "h2": 2, "h3": 2, "div": 1, "h4": 1, "dt": 1, "dd": 1, "li": 1, "tr": 1}
_LINE_BREAKS |= {"td": 1, "th": 1}
_EMPTY_ELEMENTS = frozenset({"br", "hr", "meta", "link", "img", "col"})
_HIDDEN_CLASSES = frozenset({"navheader", "navfooter", "toc", "footnotes", "indexterm"})


class _PageText(HTMLParser):
    """Collects the visible text of one DocBook page: white space collapsed outside of `pre`, one line a block."""

    def __init__(self) -> None:
        """Start with no text."""
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = ["\n"]
        self._hidden_at: int | None = None
        self._depth = 0
        self._in_pre = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element: hide navigation, break the line before a block."""
        if tag in _EMPTY_ELEMENTS:
            self.handle_startendtag(tag, attrs)
            return
        self._depth += 1
        classes = set((dict(attrs).get("class") or "").split())
        if self._hidden_at is None and (tag in {"title", "script", "style"} or classes & _HIDDEN_CLASSES):
            self._hidden_at = self._depth
        self._append("\n" * _LINE_BREAKS.get(tag, 0))
        self._in_pre = self._in_pre or tag == "pre"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Treat an empty element as a break where it is one; it opens nothing."""
        if tag in {"br", "hr"}:
            self._append("\n")

    def handle_endtag(self, tag: str) -> None:
        """Close an element, and the hidden part with it."""
        if tag in _EMPTY_ELEMENTS:
            return
        self._append("\n" * (tag in _LINE_BREAKS))
        if self._hidden_at == self._depth:
            self._hidden_at = None
        self._depth -= 1
        self._in_pre = self._in_pre and tag != "pre"

    def handle_data(self, data: str) -> None:
        """Keep visible text; at the start of a line white space counts in `pre` only."""
        if self._in_pre:
            self._append(data)
            return
        collapsed = re.sub(r"\s+", " ", data)
        self._append(collapsed.lstrip() if self.parts[-1].endswith("\n") else collapsed)

    def _append(self, text: str) -> None:
        if text and self._hidden_at is None:
            self.parts.append(text)


def clean_html(text: str) -> str:
    """Return the visible text of a DocBook HTML page, without navigation."""
    page = _PageText()
    page.feed(text)
    page.close()
    return tidy("".join(page.parts).replace("\xa0", " "))


def tidy(text: str) -> str:
    """Strip trailing blanks, expand tabs, and allow at most one empty line between two filled ones."""
    lines = [line.rstrip() for line in text.expandtabs(4).splitlines()]
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip() + "\n"


def unwrapped(paragraph: str) -> str:
    """Join the lines of a paragraph by single spaces."""
    return re.sub(r"\s+", " ", paragraph).strip()
