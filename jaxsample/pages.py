"""Who holds which pages of a paged cache: a pool on the host, with a count of holders for each page.

Knows nothing of requests or of the device. A page with several holders is read by all and written by none.
Plain lists: a request holds few pages, for which they take less time than arrays.
"""

from collections.abc import Sequence

import numpy as np


class PagePool:
    """Pages 0 ... num_pages - 1, each free or held."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._free = list(range(num_pages))[::-1]  # a stack

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def holders(self) -> np.ndarray:
        """How many hold each page: i64[num_pages], a copy; 0 is free."""
        return np.asarray(self._holders)

    def take(self, count: int) -> list[int]:
        """Free pages, now with one holder each.

        Raises:
          ValueError: fewer are free; nothing is taken.
        """
        free, holders = self._free, self._holders
        rest = len(free) - count
        if not 0 <= count <= len(free):
            raise ValueError(f"count is {count}, allowed is 0 ... {len(free)} (free pages)")
        pages = free[rest:]
        del free[rest:]
        for page in pages:
            holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One holder more for each of these pages (distinct, held)."""
        for page in pages:
            self._holders[page] += 1

    def give(self, pages: Sequence[int]) -> None:
        """One holder less for each of these pages (distinct, held); those without holders are free.

        Raises:
          ValueError: a page that nobody holds; nothing is given back.
        """
        free, holders = self._free, self._holders
        if not all(map(holders.__getitem__, pages)):
            raise ValueError(
                f"pages hold {[page for page in pages if not holders[page]]}, which are free already"
            )
        for page in pages:
            left = holders[page] = holders[page] - 1
            if not left:
                free.append(page)
