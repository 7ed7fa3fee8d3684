"""Who holds which pages of a paged cache: a pool on the host, with a count of holders for each page.

Knows nothing of requests or of the device. A page with several holders is read by all and written by none.
"""

import numpy as np


class PagePool:
    """Pages 0 ... num_pages - 1, each free or held.

    Attributes:
      holders: i32[num_pages], how many hold each page; 0 is free.
    """

    def __init__(self, num_pages: int):
        self.holders = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack: its first num_free entries
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, count: int) -> np.ndarray:
        """Free pages, now with one holder each: i32[count].

        Raises:
          ValueError: fewer are free; nothing is taken.
        """
        if not 0 <= count <= self._num_free:
            raise ValueError(f"count is {count}, allowed is 0 ... {self._num_free} (free pages)")
        pages = self._free[self._num_free - count : self._num_free].copy()
        self._num_free -= count
        self.holders[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """One holder more for each of these pages (i32[n], distinct, held)."""
        self.holders[pages] += 1

    def give(self, pages: np.ndarray) -> None:
        """One holder less for each of these pages (i32[n], distinct, held); those without holders are free.

        Raises:
          ValueError: a page that nobody holds; nothing is given back.
        """
        left = self.holders[pages] - 1
        if left.min(initial=0) < 0:
            raise ValueError(f"pages hold {pages[left < 0]}, which are free already")
        self.holders[pages] = left
        free = pages[left == 0]
        self._free[self._num_free : self._num_free + len(free)] = free
        self._num_free += len(free)
