"""Reference pages equal the code, and every reason code is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from crossdock.cli.reference import PAGES

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "run: python -m crossdock.cli.reference docs"


def test_every_reason_code_is_explained() -> None:
    source = (ROOT / "framework/crossdock/compatibility_rules.py").read_text(encoding="utf-8")
    codes = set(re.findall(r"_finding\(\s*\"([a-z0-9_]+)\"", source))
    explained = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert len(codes) >= 14
    assert [code for code in sorted(codes) if f"`{code}`" not in explained] == []


def test_every_link_between_pages_leads_to_a_file() -> None:
    broken: list[str] = []
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "plugins").glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [
        page.name for page in (ROOT / "docs").rglob("*.md") if page.name != "index.md" and page.name not in index
    ] == []
