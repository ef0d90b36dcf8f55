"""Groups and requests for tests of the manager."""

from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.request import Request
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec


def group(block_size, window=None, *, is_draft=False, dtype="bfloat16"):
    common = {"block_size": block_size, "head_size": 512, "dtype": dtype, "alignment": 512}
    if window is None:
        spec = MLAAttentionSpec(**common)
    else:
        spec = SlidingWindowMLASpec(sliding_window=window, **common)
    return KVCacheGroup(layers=(), specs=(), spec=spec, is_draft=is_draft)


def groups(*shapes, draft=None):
    """One group per (block size, window); window None keeps every block."""
    return tuple(group(*shape, is_draft=index == draft) for index, shape in enumerate(shapes))


PRO = ((256, None), (64, 128), (64, 128), (8, 128), (4, 8))  # DeepSeek-V4-Pro's groups


def manager_of(*shapes, draft=None, **options):
    options = {"num_blocks": 400, "max_model_len": 4096, "max_in_flight_tokens": 256, "max_requests": 8} | options
    return KVCacheManager(groups=groups(*(shapes or PRO), draft=draft), **options)


def add(manager, request_id, token_ids, **options):
    request = Request(request_id, token_ids, **options)
    manager.add_request(request)
    return request


def compute(manager, request, chunk=128, **options):
    """Runs a request to the end of its known tokens, look-up first; returns the tokens that it hit."""
    hits = manager.get_computed_blocks(request)
    computed, first = hits.num_tokens, hits
    while computed < request.num_tokens:
        new = min(chunk, request.num_tokens - computed)
        assert manager.allocate_slots(request, new, new_computed_blocks=first, **options) is not None
        computed += new
        request.num_computed_tokens, request.status, first = computed, "running", None
    return hits.num_tokens
