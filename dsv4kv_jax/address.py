"""Where the row of a token lies: the same arithmetic as the kernels', in plain integers and for people."""

import dataclasses

from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.layout import PageLayout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowAddress:
    """The row that holds, or summarises, one token of one layer.

    Attributes:
      entry: index into the request's block table; the block's id stands there.
      row: row of the page.
      parts: (section, first byte counted from the start of the block, bytes) of each part of the row.
    """

    entry: int
    row: int
    parts: tuple[tuple[str, int, int], ...]


def row_address(page: PageLayout, token: int) -> RowAddress:
    """The address of position `token` of a request in a layer's pages.

    A byte of the slab is `block_id * page.block_stride_bytes` past the start of the block.

    Raises:
      PlanError: a negative position.
    """
    if token < 0:
        raise PlanError(f"token={token} must be a position of at least 0")
    entry, within = divmod(token, page.spec.block_size)
    row = within // page.spec.compress_ratio
    parts = tuple(
        (
            section.name,
            page.offset_bytes + page.format.section_start(index, page.storage_block_size) + row * section.row_bytes,
            section.row_bytes,
        )
        for index, section in enumerate(page.format.sections)
    )
    return RowAddress(entry=entry, row=row, parts=parts)
