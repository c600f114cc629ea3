"""Fetch the documentation packages, strip their markup and write the corpus: one JSON-lines file a domain, plus chat.

    python prepare_data.py --work build/mini

Needs Debian 12 (`apt-get`, `dpkg-deb`) and the network, no root. Result: `WORK/corpus/{python,git,man,sql}.jsonl` with
one `{"name", "text"}` a document, `WORK/corpus/chat.jsonl` with one list of `[role, text]` a line, and
`WORK/corpus/sources.json` with package, version and SHA-256 of what was read.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from chat_turns import Fact, conversations, glossary_facts, manual_facts, python_facts, sql_facts
from clean_text import clean_asciidoc, clean_html, clean_man, clean_rst

PACKAGES = {
    "python3.11-doc": "3.11.2-6+deb12u9",
    "git-doc": "1:2.39.5-0+deb12u3",
    "manpages": "6.03-2",
    "manpages-dev": "6.03-2",
    "postgresql-doc-15": "15.20-0+deb12u1",
    "mandoc": "1.14.6-1+b1",
}
SEED = 20261130
MAN_RENDER = ("-T", "utf8", "-O", "width=84,indent=2")
PYTHON_GLOSSARY = r"^   (?P<term>\S[^\n]*)\n      (?P<body>(?:      .*|\S.*|\n)(?:\n(?:      .*)?)*)"
GIT_GLOSSARY = r"^\[\[def_[^\]]+\]\](?P<term>[^:\n]+)::\n(?P<body>(?:\t.*\n|\+\n|\n)+)"
SQL_SKIPPED = ("bookindex", "index", "legalnotice", "release", "biblio", "errcodes-appendix", "acknowledgements")


def fetch(work: Path) -> dict[str, dict[str, str]]:
    """Download and unpack `PACKAGES` under `work`; return package -> {version, sha256}.

    Raises `subprocess.CalledProcessError` where apt has no such version: then take the version that it has, and
    expect a slightly different corpus.
    """
    debs, unpacked = work / "debs", work / "unpacked"
    debs.mkdir(parents=True, exist_ok=True)
    sources = {}
    for package, version in PACKAGES.items():
        if not list(debs.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=debs, check=True, timeout=300)
        deb = next(iter(debs.glob(f"{package}_*.deb")))
        subprocess.run(["dpkg-deb", "-x", deb, unpacked], check=True, timeout=120)
        sources[package] = {"version": version, "sha256": hashlib.sha256(deb.read_bytes()).hexdigest()}
    return sources


def python_documents(unpacked: Path, facts: list[Fact]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the Python manual and add its facts."""
    root = unpacked / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(root.rglob("*.rst.txt")):
        raw = path.read_text(encoding="utf-8")
        name = str(path.relative_to(root)).removesuffix(".rst.txt")
        if name.startswith("library/"):
            facts.extend(python_facts(raw))
        if name == "glossary":
            facts.extend(glossary_facts(raw, "python", PYTHON_GLOSSARY))
        yield name, clean_rst(raw)


def git_documents(unpacked: Path, facts: list[Fact]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of git's documentation and add its facts."""
    for path in sorted((unpacked / "usr/share/doc/git-doc").glob("*.txt")):
        raw = path.read_text(encoding="utf-8")
        if path.stem == "glossary-content":
            facts.extend(glossary_facts(raw, "git", GIT_GLOSSARY))
        text = clean_asciidoc(raw)
        if path.stem.startswith("git"):
            facts.extend(manual_facts("git", text, ""))
        yield path.stem, text


def man_documents(unpacked: Path, facts: list[Fact]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the man pages, rendered by mandoc, and add their facts."""
    for path in sorted((unpacked / "usr/share/man").glob("man[1-8]/*.gz")):
        if path.is_symlink() or path.name.startswith(("mandoc", "demandoc")):
            continue
        raw = gzip.decompress(path.read_bytes())
        if len(raw) < 200:  # a page that only includes another one
            continue
        command = [str(unpacked / "usr/bin/mandoc"), *MAN_RENDER]
        rendered = subprocess.run(command, input=raw, capture_output=True, check=False, timeout=60).stdout
        text = clean_man(rendered.decode("utf-8", errors="replace"))
        name, section = path.name.removesuffix(".gz").rsplit(".", 1)
        facts.extend(manual_facts("man", text, f"({section})"))
        yield f"{name}({section})", text


def sql_documents(unpacked: Path, facts: list[Fact]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of PostgreSQL's manual and add its facts."""
    for path in sorted((unpacked / "usr/share/doc/postgresql-doc-15/html").glob("*.html")):
        if path.stem.startswith(SQL_SKIPPED):
            continue
        raw = path.read_text(encoding="utf-8")
        if path.stem.startswith(("sql-", "app-")):
            facts.extend(sql_facts(raw))
        yield path.stem, clean_html(raw)


def main() -> None:
    """Run the whole step and print what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for packages and corpus")
    work: Path = parser.parse_args().work
    sources = fetch(work)
    corpus = work / "corpus"
    corpus.mkdir(exist_ok=True)
    facts: list[Fact] = []
    readers = {"python": python_documents, "git": git_documents, "man": man_documents, "sql": sql_documents}
    for domain, documents in readers.items():
        count = size = 0
        with (corpus / f"{domain}.jsonl").open("w", encoding="utf-8") as out:
            for name, text in documents(work / "unpacked", facts):
                if len(text) < 200:
                    continue
                out.write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
                count, size = count + 1, size + len(text.encode())
        print(f"{domain}: {count} documents, {size / 1e6:.1f} MB")
    unique = list({fact.questions[0]: fact for fact in facts}.values())
    chat = conversations(unique, SEED)
    with (corpus / "chat.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(turns, ensure_ascii=False) + "\n" for turns in chat)
    (corpus / "sources.json").write_text(json.dumps(sources, indent=2) + "\n", encoding="utf-8")
    print(f"chat: {len(chat)} conversations about {len(unique)} facts")


if __name__ == "__main__":
    main()
