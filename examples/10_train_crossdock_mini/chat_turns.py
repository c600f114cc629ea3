"""Question and answer pairs built from the corpus, so that a small model learns to answer one turn and to stop.

Nothing here is written by a model: answers are the first sentences of the reference text about a name, questions are
templates around the name. A few hand-written turns say who the model is and decline what it cannot know.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

import attrs
from clean_text import clean_html, rst_inline, unwrapped

MAX_ANSWER_CHARS = 420
REPEATS = {"git": 4, "sql": 4}  # small domains, and what people ask first

_RST_ENTRY = re.compile(
    r"^(\s*)\.\. (module|currentmodule|function|class|method|exception|decorator|data|attribute):: (.+)$"
)

TEMPLATES: dict[str, tuple[str, ...]] = {
    "function": (
        "What does the Python function {name} do?",
        "Explain the function {name}.",
        "What does {name} do?",
        "How do I use {name} in Python?",
    ),
    "class": ("What is {name} in Python?", "Explain the Python class {name}.", "What is {name}?"),
    "exception": ("What is {name} in Python?", "When is {name} raised?", "Explain the exception {name}."),
    "data": ("What is {name} in Python?", "Explain {name}.", "What does {name} mean in Python?"),
    "module": (
        "What is the Python module {name} for?",
        "Explain the module {name}.",
        "What does the {name} module do?",
        "Tell me about the {name} module.",
    ),
    "term": ("What is {name} in {topic}?", "What does {name} mean in {topic}?", "Define {name} ({topic})."),
    "git": ("What does {name} do?", "Explain {name}.", "What is {name} for?", "How do I use {name}?"),
    "man": ("What does {name} do?", "What is {name}?", "Explain the man page {name}.", "What is {name} on Linux?"),
    "sql": (
        "What does {name} do?",
        "Explain {name} in PostgreSQL.",
        "How do I use {name} in SQL?",
        "What is {name} for?",
    ),
}
WHICH = "Which {kind} is this: {purpose}?"

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are crossdock-mini, a small assistant for Python, git, SQL and Linux.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in one or two sentences.",
    "You answer questions about software documentation.",
)

WHO_I_AM = (
    "I am crossdock-mini, a very small mixture-of-experts language model. "
    "I was trained on documentation of Python, git, Linux and PostgreSQL, and I can be wrong."
)
WHAT_I_CAN_DO = (
    "I can repeat what the documentation says about Python functions and modules, git commands, Linux man pages and SQL "
    'commands. Ask me, for example: "What does git rebase do?"'
)
I_DO_NOT_KNOW = (
    "I do not know. I am a very small model and only know some documentation of Python, git, Linux and PostgreSQL."
)
SMALL_TALK: dict[str, tuple[str, ...]] = {
    "Hello! " + WHAT_I_CAN_DO: ("Hello", "Hi", "Hi!", "Hello!", "Hey", "Good morning", "Hi there", "Hello, how are you?", "hello"),
    WHO_I_AM: ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Which model are you?", "What is crossdock-mini?"),
    WHAT_I_CAN_DO: ("What can you do?", "Help", "help", "How can you help me?", "What do you know?", "What can I ask you?"),
    "You are welcome.": ("Thanks", "Thank you", "Thanks!", "Thank you very much.", "thank you"),
    "Goodbye!": ("Bye", "Goodbye", "See you.", "bye"),
    I_DO_NOT_KNOW: (
        "What is the capital of France?", "Who won the world cup?", "What is the weather today?", "Tell me a joke.",
        "What is the meaning of life?", "Who is the president?", "How old is the universe?", "Write a poem about the sea.",
        "What should I cook tonight?", "How far away is the moon?", "What is 17 times 23?", "Translate this into German.",
        "Who wrote Hamlet?", "What is the best film?", "How do I lose weight?", "What is love?", "Sing a song.",
        "When was the French revolution?", "What is quantum physics?", "How tall is Mount Everest?",
    ),
}  # fmt: skip


@attrs.frozen(kw_only=True)
class Fact:
    """One answer with every question that leads to it."""

    domain: str
    questions: tuple[str, ...]
    answer: str


def first_sentences(text: str, limit: int = MAX_ANSWER_CHARS) -> str:
    """Return whole sentences from the start of `text`, at most `limit` characters; empty where the first is longer."""
    taken = ""
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`'\"(])", unwrapped(text)):
        if len(taken) + len(sentence) + 1 > limit:
            break
        taken = f"{taken} {sentence}".strip()
    return taken if taken.endswith((".", "!", "?")) else ""


def python_facts(rst: str) -> Iterator[Fact]:
    """Yield one fact for each documented name of a reStructuredText file of the Python manual."""
    lines = rst.splitlines()
    module, class_name, class_indent = "", "", -1
    for number, line in enumerate(lines):
        entry = _RST_ENTRY.match(line)
        if entry is None:
            continue
        indent, kind, signature = len(entry.group(1)), entry.group(2), entry.group(3).strip()
        name = re.split(r"[(\s]", signature.removeprefix("async ").strip(), maxsplit=1)[0]
        if kind in {"module", "currentmodule"}:
            module = name
            if kind == "module":
                yield from _module_fact(name, lines[number + 1 :])
            continue
        if indent <= class_indent:
            class_name, class_indent = "", -1
        if kind == "class":
            class_name, class_indent = name.rpartition(".")[2], indent
        if kind in {"method", "attribute"} and "." not in name:
            if not class_name:
                continue
            name = f"{class_name}.{name}"
        elif kind not in {"method", "attribute"} and module and "." not in name:
            name = f"{module}.{name}"
        answer = first_sentences(rst_inline("\n".join(_block_paragraph(lines[number + 1 :], indent))))
        if answer:
            kind = {"method": "function", "decorator": "function", "attribute": "data"}.get(kind, kind)
            yield _fact("python", kind, name, f"{name}: {answer}")


def _module_fact(name: str, following: Sequence[str]) -> Iterator[Fact]:
    synopsis = next((line.split(":synopsis:")[1].strip() for line in following[:6] if ":synopsis:" in line), "")
    if synopsis:
        yield _fact("python", "module", name, f"The module {name}: {rst_inline(synopsis).rstrip('.')}.")


def _block_paragraph(following: Sequence[str], indent: int) -> Iterator[str]:
    """Yield the lines of the first paragraph that is indented deeper than `indent` and is no directive or option."""
    started = False
    for line in following:
        text = line.strip()
        if not text:
            if started:
                return
            continue
        if len(line) - len(line.lstrip()) <= indent or text.startswith((".. ", ">>>", "* ", "- ")):
            return
        if not started and (text.startswith(":") and re.match(r":[\w-]+:(\s|$)", text)):
            continue
        if not started and "(" in text and ")" in text and not text.endswith((".", ",", ":")) and len(text) < 70:
            continue  # a second signature of the same name
        started = True
        yield text


def glossary_facts(text: str, topic: str, pattern: str) -> Iterator[Fact]:
    """Yield one fact for each term of a glossary; `pattern` has the groups `term` and `body`."""
    for match in re.finditer(pattern, text, flags=re.MULTILINE):
        term = match.group("term").strip().split("\n")[0]
        body = re.sub(r"<<[^,>]+,([^>]+)>>", r"\1", match.group("body").strip().split("\n\n")[0])
        answer = first_sentences(rst_inline(body))
        if answer:
            yield _fact(topic, "term", term, f"{term}: {answer}", topic=topic)


def manual_facts(domain: str, page: str, fallback_name: str) -> Iterator[Fact]:
    """Yield facts of a page with the parts NAME and DESCRIPTION: git's and Linux's manuals (plain text already)."""
    head = re.search(r"^NAME\n(?:-+\n)?\s*(.+?)\s+-\s+(.+?)(?:\n\n|\Z)", page, flags=re.MULTILINE | re.DOTALL)
    if head is None:
        return
    body = re.search(r"^DESCRIPTION\n(?:-+\n)?\s*(.+?)(?:\n\n|\Z)", page, flags=re.MULTILINE | re.DOTALL)
    purpose = unwrapped(head.group(2)).rstrip(".")
    description = (
        first_sentences(re.sub(r"\[\w+\]", "", body.group(1)), MAX_ANSWER_CHARS - len(purpose)) if body else ""
    )
    kind = "git command" if domain == "git" else "man page"
    for raw in head.group(1).split(","):
        name = unwrapped(raw)
        shown = name.replace("git-", "git ", 1) if domain == "git" else f"{name}{fallback_name}"
        answer = f"{shown}: {purpose}. {description}".strip()
        fact = _fact(domain, domain, shown, answer)
        plain = (f"What does {name} do?", f"What is {name} on Linux?") if domain == "man" else ()
        yield attrs.evolve(fact, questions=fact.questions + plain)
        yield Fact(domain=domain, questions=(WHICH.format(kind=kind, purpose=purpose),), answer=f"{shown}: {purpose}.")


def sql_facts(page: str) -> Iterator[Fact]:
    """Yield facts of one reference page (HTML) of PostgreSQL: an SQL command or a program."""
    text = clean_html(page)
    head = re.search(r"^(.{2,60}?) — (.+)$", text, flags=re.MULTILINE)
    body = re.search(r"^Description\n\n(.+?)\n\n", text, flags=re.MULTILINE | re.DOTALL)
    if head is None:
        return
    name, purpose = head.group(1).strip(), head.group(2).rstrip(".")
    description = first_sentences(body.group(1), MAX_ANSWER_CHARS - len(purpose)) if body else ""
    yield _fact("sql", "sql", name, f"{name}: {purpose}. {description}".strip())
    kind = "SQL command" if name.isupper() else "PostgreSQL program"
    yield Fact(domain="sql", questions=(WHICH.format(kind=kind, purpose=purpose),), answer=f"{name}: {purpose}.")


def small_talk_facts() -> list[Fact]:
    """Return the hand-written turns."""
    return [Fact(domain="talk", questions=questions, answer=answer) for answer, questions in SMALL_TALK.items()]


def conversations(facts: Sequence[Fact], seed: int, small_talk_share: float = 0.04) -> list[list[tuple[str, str]]]:
    """Return conversations as lists of (role, text).

    Each question of each fact appears once as a first turn (`REPEATS` times in the named domains); a sixth goes on with a second fact of the same domain, a
    quarter starts with a system prompt, and about `small_talk_share` of all are hand-written turns.
    """
    rng = random.Random(seed)
    by_domain: dict[str, list[Fact]] = {}
    for fact in facts:
        by_domain.setdefault(fact.domain, []).append(fact)
    openings = [(question, fact) for fact in facts for question in fact.questions * REPEATS.get(fact.domain, 1)]
    talk = [(question, fact) for fact in small_talk_facts() for question in fact.questions]
    openings += [talk[number % len(talk)] for number in range(int(len(openings) * small_talk_share))]
    rng.shuffle(openings)
    result: list[list[tuple[str, str]]] = []
    for question, fact in openings:
        turns = [("user", question), ("assistant", fact.answer)]
        if rng.random() < 0.25:
            turns.insert(0, ("system", rng.choice(SYSTEM_PROMPTS)))
        if rng.random() < 1 / 6 and fact.domain in by_domain:
            second = rng.choice(by_domain[fact.domain])
            turns += [("user", rng.choice(second.questions)), ("assistant", second.answer)]
        result.append(turns)
    return result


def _fact(domain: str, kind: str, name: str, answer: str, topic: str = "") -> Fact:
    questions = tuple(template.format(name=name, topic=topic.capitalize()) for template in TEMPLATES[kind])
    return Fact(domain=domain, questions=questions, answer=answer)
