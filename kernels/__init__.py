"""Device operations on the slab: writing, indexing and reading cache rows. Import as `dsv4kv_jax.kernels`."""

if __name__ != "dsv4kv_jax.kernels":
    raise ImportError(
        f"this package is dsv4kv_jax.kernels, not {__name__}: a second name would make a second copy of its "
        f"registries; use `from dsv4kv_jax import kernels`"
    )

from dsv4kv_jax.kernels.attention import sparse_attention as sparse_attention
from dsv4kv_jax.kernels.blocks import copy_blocks as copy_blocks
from dsv4kv_jax.kernels.blocks import zero_blocks as zero_blocks
from dsv4kv_jax.kernels.flashinfer import flashinfer_indices as flashinfer_indices
from dsv4kv_jax.kernels.flashinfer import storage_offsets as storage_offsets
from dsv4kv_jax.kernels.index_scores import index_scores as index_scores
from dsv4kv_jax.kernels.indices import c128a_indices as c128a_indices
from dsv4kv_jax.kernels.indices import c128a_width as c128a_width
from dsv4kv_jax.kernels.indices import draft_indices as draft_indices
from dsv4kv_jax.kernels.indices import swa_indices as swa_indices
from dsv4kv_jax.kernels.indices import topk_to_slots as topk_to_slots
from dsv4kv_jax.kernels.prefill import combine_topk_swa as combine_topk_swa
from dsv4kv_jax.kernels.prefill import gather_lens as gather_lens
from dsv4kv_jax.kernels.prefill import prefill_chunks as prefill_chunks
from dsv4kv_jax.kernels.rows import RowWrite as RowWrite
from dsv4kv_jax.kernels.rows import StateRows as StateRows
from dsv4kv_jax.kernels.rows import gather_rows as gather_rows
from dsv4kv_jax.kernels.rows import gather_sequence as gather_sequence
from dsv4kv_jax.kernels.rows import insert_many as insert_many
from dsv4kv_jax.kernels.rows import insert_rows as insert_rows
from dsv4kv_jax.kernels.slots import compressed_slot_mapping as compressed_slot_mapping
from dsv4kv_jax.kernels.slots import slot_mapping as slot_mapping
from dsv4kv_jax.kernels.states import StateWindows as StateWindows
from dsv4kv_jax.kernels.states import window_means as window_means
from dsv4kv_jax.kernels.top_k import top_k_indices as top_k_indices

__all__ = [
    "RowWrite",
    "StateRows",
    "StateWindows",
    "c128a_indices",
    "c128a_width",
    "combine_topk_swa",
    "compressed_slot_mapping",
    "copy_blocks",
    "draft_indices",
    "flashinfer_indices",
    "gather_lens",
    "gather_rows",
    "gather_sequence",
    "index_scores",
    "insert_many",
    "insert_rows",
    "prefill_chunks",
    "slot_mapping",
    "sparse_attention",
    "storage_offsets",
    "swa_indices",
    "top_k_indices",
    "topk_to_slots",
    "window_means",
    "zero_blocks",
]
