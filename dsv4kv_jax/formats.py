"""Byte formats of cache rows: one named entry of one registry for each way a row is stored.

A page holds `storage_block_size` rows. It is laid out section by section: all rows of the first section, then all
rows of the second, then padding up to the page's alignment. A `fp8_ds_mla` page of 64 rows is therefore
64 x 576 data bytes followed by 64 x 8 scale bytes, never 64 x 584. Source of the built-in formats: the cache layouts
of vLLM 0.27.1 and FlashMLA for DeepSeek-V4.

Plain Python: how values become these bytes is the codec's business (`dsv4kv_jax.kernels.codecs`).
"""

import dataclasses
import math

import jax
import ml_dtypes
import numpy as np

WORD_BYTES = 4  # the slab is an array of uint32 words, so sections are whole words

_DTYPES: dict[str, np.dtype] = {
    "uint8": np.dtype(np.uint8),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype called `name`; raises `ValueError` for a dtype that no cache row uses."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"dtype={name!r} is not a cache dtype; use one of {sorted(_DTYPES)}") from None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """`count` consecutive values of `dtype` (a numpy name) inside a row's section.

    Raises:
      ValueError: no name, a dtype that no cache row uses, or a count that is no positive integer.
    """

    name: str
    dtype: str
    count: int

    def __post_init__(self) -> None:
        _check_name("field", self.name)
        numpy_dtype(self.dtype)
        _check_count(f"count of field {self.name!r}", self.count)

    @property
    def size_bytes(self) -> int:
        return numpy_dtype(self.dtype).itemsize * self.count


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The part of a row that is stored together, and apart from the row's other sections.

    Raises:
      ValueError: no name, no tuple of fields with different names, or not a whole number of 4-byte words.
    """

    name: str
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        _check_parts("section", self.name, "fields", self.fields, Field)
        if self.row_bytes <= 0 or self.row_bytes % WORD_BYTES:
            raise ValueError(
                f"section {self.name!r} has {self.row_bytes} bytes a row; it must be a positive multiple of "
                f"{WORD_BYTES} because the slab is made of 32-bit words: add a padding field"
            )

    @property
    def row_bytes(self) -> int:
        return sum(field.size_bytes for field in self.fields)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """How one row of a page is stored.

    `num_values` is the row's length as its users see it (512 latent values, 128 indexer values, ...), whatever the
    number of bytes. `page_dtype` and `view_width` are the dtype and innermost length of the tensor that PyTorch code
    expects for such a page (vLLM shapes fp8_ds_mla pages `[..., 584]` although no row is 584 contiguous bytes).

    Raises:
      ValueError: no name, no tuple of sections with different names, no positive number of values, or a page dtype
        that no cache row uses or of which a row is no whole number.
    """

    name: str
    num_values: int
    sections: tuple[Section, ...]
    page_dtype: str = "uint8"

    def __post_init__(self) -> None:
        _check_parts("format", self.name, "sections", self.sections, Section)
        _check_count(f"num_values of format {self.name!r}", self.num_values)
        if self.row_bytes % (item := numpy_dtype(self.page_dtype).itemsize):
            raise ValueError(
                f"format {self.name!r} has {self.row_bytes} bytes a row, no whole number of the {item} bytes of "
                f"page_dtype={self.page_dtype!r}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all sections."""
        return sum(section.row_bytes for section in self.sections)

    @property
    def view_width(self) -> int:
        return self.row_bytes // numpy_dtype(self.page_dtype).itemsize

    def section_start(self, index: int, num_rows: int) -> int:
        """Byte offset, from the start of a page of `num_rows` rows, of section `index`."""
        return num_rows * sum(section.row_bytes for section in self.sections[:index])

    def chunk_words(self, index: int, num_rows: int, words_per_slab_row: int) -> int:
        """Largest run of words that never straddles a slab row, for every row of section `index`.

        A row of the section is moved as whole runs of this length, so that one scatter or gather window stays inside
        one row of the slab.
        """
        start = self.section_start(index, num_rows) // WORD_BYTES
        return math.gcd(self.sections[index].row_bytes // WORD_BYTES, start, words_per_slab_row)


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{kind} name {name!r} must be a string that is not empty")


def _check_count(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is {value!r}; it must be an integer of at least 1")


def _check_parts(kind: str, name: object, what: str, parts: object, part: type[Field] | type[Section]) -> None:
    _check_name(kind, name)
    if not isinstance(parts, tuple) or not parts or not all(isinstance(one, part) for one in parts):
        raise ValueError(f"{kind} {name!r} has {what}={parts!r}; they must be a tuple of at least one {part.__name__}")
    names = [one.name for one in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"{kind} {name!r} has {what} {names}; give them different names")


def plain_format(dtype: str, num_values: int, name: str | None = None) -> RowFormat:
    """A row stored as it is: `num_values` values of `dtype`, nothing else."""
    data = Section(name="data", fields=(Field(name="values", dtype=dtype, count=num_values),))
    return RowFormat(name=name or dtype, num_values=num_values, sections=(data,), page_dtype=dtype)


def _indexer(name: str, data: Field, scale: Field, num_values: int) -> RowFormat:
    sections = (Section(name="data", fields=(data,)), Section(name="scale", fields=(scale,)))
    return RowFormat(name=name, num_values=num_values, sections=sections)


FP8_DS_MLA = RowFormat(
    name="fp8_ds_mla",
    num_values=512,
    sections=(
        Section(
            name="data",
            fields=(
                Field(name="nope", dtype="float8_e4m3fn", count=448),
                Field(name="rope", dtype="bfloat16", count=64),
            ),
        ),
        Section(
            name="scale",
            fields=(Field(name="ue8m0", dtype="uint8", count=7), Field(name="pad", dtype="uint8", count=1)),
        ),
    ),
)
INDEXER_FP8 = _indexer(
    "indexer_fp8",
    Field(name="key", dtype="float8_e4m3fn", count=128),
    Field(name="scale", dtype="float32", count=1),
    128,
)
INDEXER_FP8_UE8M0 = _indexer(
    "indexer_fp8_ue8m0",
    Field(name="key", dtype="float8_e4m3fn", count=128),
    Field(name="ue8m0", dtype="uint8", count=4),
    128,
)
INDEXER_MXFP4 = _indexer(
    "indexer_mxfp4",
    Field(name="key", dtype="uint8", count=64),
    Field(name="ue8m0", dtype="uint8", count=4),
    128,
)

# vLLM's cache strings for rows that are stored as they are; the dtype says the rest.
PLAIN_CACHE_STRINGS = frozenset({"auto", "bfloat16", "fp8", "fp8_e4m3"})

_REGISTRY: dict[str, RowFormat] = {}


def register_format(fmt: RowFormat) -> RowFormat:
    """Adds `fmt` to the registry, so that a spec with `cache_dtype_str=fmt.name` is stored that way.

    Raises:
      ValueError: no format, another format already has this name, or it is vLLM's for rows that are stored as they are.
    """
    if not isinstance(fmt, RowFormat):
        raise ValueError(f"{fmt!r} is no RowFormat")
    if fmt.name in PLAIN_CACHE_STRINGS or fmt.name in _DTYPES:
        raise ValueError(f"format name {fmt.name!r} stands for rows that are stored as they are; choose another name")
    known = _REGISTRY.setdefault(fmt.name, fmt)
    if known != fmt:
        raise ValueError(f"format {fmt.name!r} is already registered as {known}; choose another name")
    return fmt


for _fmt in (FP8_DS_MLA, INDEXER_FP8, INDEXER_FP8_UE8M0, INDEXER_MXFP4):
    register_format(_fmt)

# vLLM tells indexer caches apart by nothing but their width.
_UINT8_BY_WIDTH = {INDEXER_FP8.row_bytes: INDEXER_FP8, INDEXER_MXFP4.row_bytes: INDEXER_MXFP4}


def format_of(dtype: str, head_size: int, cache_dtype_str: str | None) -> RowFormat:
    """The row format of a spec: by the registered name in `cache_dtype_str`, else by dtype and width.

    Raises:
      ValueError: no cache row has this dtype, an unknown cache string, or a named format of another dtype.
    """
    numpy_dtype(dtype)
    if fmt := _REGISTRY.get(cache_dtype_str or ""):
        if fmt.page_dtype != dtype:
            raise ValueError(
                f"dtype={dtype!r} does not fit cache_dtype_str={cache_dtype_str!r}, stored as {fmt.page_dtype}"
            )
        return fmt
    if cache_dtype_str is not None and cache_dtype_str not in PLAIN_CACHE_STRINGS:
        known = ", ".join(sorted({*PLAIN_CACHE_STRINGS, *_REGISTRY}))
        raise ValueError(f"cache_dtype_str={cache_dtype_str!r} is not known; use one of {known}, or register a format")
    if dtype == "uint8" and head_size in _UINT8_BY_WIDTH:
        return _UINT8_BY_WIDTH[head_size]
    return plain_format(dtype, head_size)
