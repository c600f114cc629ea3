"""Pages of one replica's KV cache: who owns which, and which full pages can be found again by their content.

Pure bookkeeping on page numbers; the tensors are in ``crossdock.kv_storage``. Page 0 is scratch: padded rows write there, no
sequence ever owns it. A full page is known by the hash of its tokens chained to the hash of the page before it, so equal hashes mean
equal prefixes. A page is in exactly one state: free (content worthless), cached (nobody holds it, can be found by hash, evicted least
recently used first) or held (by one sequence or more).
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import attrs
import xxhash

from crossdock.errors import MisuseError

PageHash: TypeAlias = bytes
"""16 bytes, xxh3-128 of the previous page's hash and this page's tokens."""

ROOT_HASH: PageHash = b""
"""What the first page of a sequence is chained to."""

SCRATCH_PAGE = 0


def page_hash(previous: PageHash, tokens: Sequence[int], seed: int) -> PageHash:
    """Hash of one full page after ``previous``. ``seed`` is drawn per process so that collisions cannot be prepared outside."""
    return xxhash.xxh3_128_digest(previous + array("q", tokens).tobytes(), seed)


@attrs.frozen(kw_only=True)
class KvUsage:
    """Pages by state; the three add up to all usable pages."""

    free: int
    cached: int
    held: int

    @property
    def fraction_held(self) -> float:
        return self.held / max(1, self.free + self.cached + self.held)


class BlockPool:
    """Allocates pages 1 .. num_pages - 1 and finds full pages by hash.

    The caller holds each page of its sequences once; a page found by ``match`` is held by several. Errors of the caller (a page
    released twice, a hash given to a page nobody holds) raise ``MisuseError``: they mean wrong text, never something to go on from.
    """

    def __init__(
        self, num_pages: int, page_tokens: int, *, seed: int | None = None, keep_prefixes: bool = True
    ) -> None:
        if num_pages < 2 or page_tokens < 1:
            raise MisuseError(
                f"a KV cache needs at least 2 pages (page 0 is scratch) of 1 token, found {num_pages} pages of {page_tokens} tokens"
            )
        self.page_tokens = page_tokens
        self._num_pages = num_pages
        self._seed = secrets.randbits(64) if seed is None else seed
        self._keep_prefixes = keep_prefixes
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_pages
        self._hash_of: dict[int, PageHash] = {}
        self._page_of: dict[PageHash, int] = {}

    @property
    def usable_pages(self) -> int:
        return self._num_pages - 1

    @property
    def available_pages(self) -> int:
        """Pages that ``allocate`` can give now, evicting cached ones."""
        return len(self._free) + len(self._cached)

    def usage(self) -> KvUsage:
        held = self.usable_pages - self.available_pages
        return KvUsage(free=len(self._free), cached=len(self._cached), held=held)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.page_tokens)

    def holders(self, page: int) -> int:
        """How many sequences hold this page."""
        return self._holders[page]

    # -- giving and taking back

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages held once each, content undefined; None (and nothing changed) when there are not enough."""
        if count > self.available_pages:
            return None
        return [self._take_one() for _ in range(count)]

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for pages that are cached or held."""
        for page in pages:
            if self._holders[page] == 0:
                if page not in self._cached:
                    raise MisuseError(f"page {page} is free and cannot be held: its content is gone")
                del self._cached[page]
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each page. Pass a sequence's pages in order: its last page is then evicted first."""
        for page in reversed(list(pages)):
            if page == SCRATCH_PAGE or self._holders[page] == 0:
                raise MisuseError(f"page {page} was released but nobody holds it")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    # -- finding pages by content

    def hash_chain(self, tokens: Sequence[int], known: Sequence[PageHash] = ()) -> list[PageHash]:
        """Hashes of the full pages of ``tokens``, given those of its first pages; none where prefixes are not kept."""
        if not self._keep_prefixes:
            return []
        chain = list(known)
        size = self.page_tokens
        for start in range(len(chain) * size, len(tokens) - size + 1, size):
            previous = chain[-1] if chain else ROOT_HASH
            chain.append(page_hash(previous, tokens[start : start + size], self._seed))
        return chain

    def match(self, chain: Sequence[PageHash]) -> list[int]:
        """Pages of the longest known prefix of ``chain``, not yet held: call ``hold`` before anything else is allocated."""
        pages: list[int] = []
        for digest in chain:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, page: int, digest: PageHash) -> None:
        """A held page is full and written: it can be found by ``digest`` from now on. A digest that has a page keeps it."""
        if self._holders[page] == 0:
            raise MisuseError(f"page {page} cannot be published: nobody holds it")
        if self._keep_prefixes and page not in self._hash_of and digest not in self._page_of:
            self._hash_of[page] = digest
            self._page_of[digest] = page

    def flush(self) -> int:
        """Forgets every hash; pages that nobody holds become free. Returns how many those are. Held pages stay with their holders."""
        flushed = len(self._cached)
        self._free.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._page_of.clear()
        return flushed

    # -- blocks from another pool

    def adopt(self, chain: Sequence[PageHash]) -> dict[PageHash, int] | None:
        """Pages for imported blocks: one for each hash of ``chain`` that is not here yet, held once until released.

        The importer writes the content, then calls ``publish`` and ``release``. None when there is no room.
        """
        missing = [digest for digest in dict.fromkeys(chain) if digest not in self._page_of]
        pages = self.allocate(len(missing))
        return None if pages is None else dict(zip(missing, pages, strict=True))

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
        self._holders[page] = 1
        return page
