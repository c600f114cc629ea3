"""How one sequence gets pages of the cache, with a known prefix where there is one, and how its full pages become findable."""

from __future__ import annotations

from crossdock.kv_cache import BlockPool
from crossdock.sequence import EngineSequence


def take_pages(pool: BlockPool, sequence: EngineSequence, *, reserve: int) -> bool:
    """Pages for all tokens of ``sequence``, the known prefix from the cache; False, and nothing changed, where fewer than ``reserve`` would be left."""
    found: list[int] = []
    if not sequence.wants_prompt_rows:
        sequence.chain = pool.hash_chain(sequence.tokens, sequence.chain)
        usable = (len(sequence.tokens) - 1) // pool.page_tokens
        found = pool.match(sequence.chain[:usable])
    pool.hold(found)
    new = pool.pages_for(len(sequence.tokens)) - len(found)
    pages = pool.allocate(new) if new + reserve <= pool.available_pages else None
    if pages is None:
        pool.release(found)
        return False
    sequence.pages = (*found, *pages)
    sequence.published = len(found)
    sequence.computed = len(found) * pool.page_tokens
    if sequence.started_s is None:
        sequence.cached_tokens = sequence.computed
    return True


def publish_full_pages(pool: BlockPool, sequence: EngineSequence, end: int) -> None:
    """The first ``end`` tokens of ``sequence`` are in the cache: the pages that they fill can be found by others."""
    full = end // pool.page_tokens
    if full <= sequence.published:
        return
    sequence.chain = pool.hash_chain(sequence.tokens[: full * pool.page_tokens], sequence.chain)
    for index in range(sequence.published, min(full, len(sequence.chain))):
        pool.publish(sequence.pages[index], sequence.chain[index])
    sequence.published = full


def release_pages(pool: BlockPool, sequence: EngineSequence) -> None:
    """Gives back whatever the sequence holds."""
    pool.release(sequence.pages)
    sequence.pages = ()
