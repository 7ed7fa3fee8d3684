"""A cache in pages of a few slots each, which any row can hold through its line of a page table.

Knows nothing about who allocates pages, nor about tokens. Slot s of row b is slot s % page_size of page
page_table[b, s // page_size]. Rows may share pages that are full; a page that is still written belongs to one
row alone, since two writers of one slot have no order. An entry of -1 is a page not allocated: writes to it
are dropped and it reads as zeros.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsample.quantize import empty_storage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """Committed keys and values in pages; S = pages_per_row * page_size slots a row.

    Fields:
      keys: [L, pages, page_size, H, D], any float dtype, int8, or uint8 for float8_e4m3fn.
      values: [L, pages, page_size, H, D], the same dtype.
      page_table: i32[B, pages_per_row], -1 for a page not allocated. One for all layers.
      key_scales, value_scales: f32[L, pages, page_size, H] where the dtype has one byte, else None.
    """

    keys: jax.Array
    values: jax.Array
    page_table: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None

    @property
    def num_rows(self) -> int:
        return self.page_table.shape[0]

    @property
    def num_slots(self) -> int:
        return self.page_table.shape[1] * self.keys.shape[2]

    def places(self, slot, kept, rows=None):
        """The two indices behind the layer at which slots lie: page and slot in the page, i32[b, M] each.

        Args:
          slot: i32[b, M], slots of each row, distinct along M.
          kept: bool[b, M]; where False, and where the page is not allocated, the page lies beyond the end.
          rows: i32[b], the rows they are slots of, distinct; None for all rows, b = B.
        """
        num_pages, page_size = self.keys.shape[1:3]
        table = self.page_table if rows is None else self.take(rows).page_table
        page = jnp.take_along_axis(table, slot // page_size, axis=1, mode="clip")
        kept = kept & (page >= 0) & (page < num_pages)
        # A page of its own for each index that is dropped, so that all stay unique.
        num_rows, num_steps = slot.shape
        beyond = num_pages + jnp.arange(num_rows * num_steps, dtype=jnp.int32).reshape(slot.shape)
        return jnp.where(kept, page, beyond), slot % page_size

    def read(self, array, layer):
        """One layer of a stacked array [L, pages, page_size, ...] in the order of the slots: [B, S, ...]."""
        page = jnp.where(self.page_table < 0, self.keys.shape[1], self.page_table)
        pages = array.at[layer, page].get(mode="fill", fill_value=0)  # [B, pages_per_row, page_size, ...]
        return pages.reshape(self.num_rows, self.num_slots, *array.shape[3:])

    def take(self, rows) -> "PagedKVCache":
        """Some rows, i32[b]: the same pages behind fewer lines of the table."""
        return dataclasses.replace(self, page_table=jnp.take(self.page_table, rows, axis=0, mode="clip"))


def init_paged_cache(
    num_layers: int, num_pages: int, page_size: int, num_heads: int, head_size: int, dtype, page_table
) -> PagedKVCache:
    """A paged cache of zeros.

    Args:
      num_layers: L. num_pages, page_size: the slots of all rows together. num_heads: H, key-value heads.
      head_size: D.
      dtype: a float dtype, int8 or float8_e4m3fn.
      page_table: i32[B, pages_per_row], copied; -1 for a page not allocated. To allocate later, replace the
        field.

    Raises:
      ValueError: a page table that is no int32[B, pages_per_row], or a dtype that is not allowed.
    """
    page_table = jnp.array(page_table)
    if page_table.ndim != 2 or page_table.dtype != jnp.int32:
        raise ValueError(
            f"page_table is {page_table.dtype}{list(page_table.shape)}, expected int32 with 2 axes: "
            "rows, pages of a row"
        )
    shape = (num_layers, num_pages, page_size, num_heads, head_size)
    keys, key_scales = empty_storage(shape, dtype)
    values, value_scales = empty_storage(shape, dtype)
    return PagedKVCache(keys, values, page_table, key_scales, value_scales)
