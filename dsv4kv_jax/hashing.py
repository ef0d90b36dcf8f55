"""Identity of cached prefixes: equal keys if and only if the contents are interchangeable (rule A8).

A key is a keyed BLAKE2b digest of 128 bits (RFC 7693): whoever does not know the manager's secret cannot construct two
prefixes with one key, so tenants cannot reach each other's blocks. Groups keep their own tables of keys, so the group
is no part of the digest. Digests are made when somebody asks for them: a prefix of any length is one chain over whole
*segments* (the scheduler block size) and a last part of a segment, and most lengths are never asked for.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from dsv4kv_jax.request import Request
from dsv4kv_jax.specs import round_up

DIGEST_BYTES = 16
SECRET_BYTES = 32
_EXTRA = b"extra keys"  # BLAKE2 personalisation, so that a prefix without extra keys never equals one with them


class PrefixKeys:
    """Keys of the prefixes of one request, computed on demand and kept.

    Calling `append` on the request extends what can be asked for.
    """

    __slots__ = ("_digests", "_hash_block_size", "_request", "_secret", "_segment")

    def __init__(self, request: Request, *, segment: int, hash_block_size: int, secret: bytes) -> None:
        """Args:
        request: whose tokens and extra keys are hashed.
        segment: tokens per link of the chain, a multiple of `hash_block_size`.
        hash_block_size: prefixes end at multiples of this many tokens.
        secret: key of the digests, at most 64 bytes.
        """
        self._request = request
        self._segment = segment
        self._hash_block_size = hash_block_size
        self._secret = secret
        self._digests: dict[int, bytes] = {0: bytes(DIGEST_BYTES)}

    def at(self, ends: Sequence[int]) -> list[bytes]:
        """The keys of the prefixes of `ends` tokens: multiples of the hash block size, at most `num_tokens`."""
        digests = self._digests
        try:
            return [digests[end] for end in ends]
        except KeyError:
            self._compute({end for end in ends if end not in digests})
            return [digests[end] for end in ends]

    def _compute(self, ends: set[int]) -> None:
        """Computes the keys of `ends` and the chain links before them that are missing."""
        segment, digests = self._segment, self._digests
        assert max(ends) <= self._request.num_tokens, "a prefix may not reach past the known tokens"
        last_link = (max(ends) - 1) // segment * segment
        link = last_link
        while link not in digests:
            link -= segment
        wanted = ends.union(range(link + segment, last_link + 1, segment))
        tokens = self._request.token_ids
        blake2b, secret = hashlib.blake2b, self._secret
        start = position = stop = 0  # of the segment being hashed, within it, and its end
        state, extra = None, False
        for end in sorted(wanted):
            if end > stop or state is None:
                start = position = (end - 1) // segment * segment
                stop = start + segment
                state = blake2b(digests[start], digest_size=DIGEST_BYTES, key=secret)
                extra = self._has_extra(start, stop)
            state.update(tokens[position:end])
            position = end
            digest = state.digest()
            digests[end] = self._with_extra(digest, start, end) if extra else digest

    def _has_extra(self, start: int, stop: int) -> bool:
        request = self._request
        if request.lora_name is not None or (request.cache_salt is not None and start == 0):
            return True
        if request.prompt_embeds is not None and start < len(request.prompt_embeds):
            return True
        return any(item.start < stop and start < item.start + item.length for item in request.mm_items)

    def _with_extra(self, digest: bytes, start: int, end: int) -> bytes:
        """`digest` joined with what besides its tokens decides the content of `[start, end)`, a part of one segment."""
        request, block = self._request, self._hash_block_size
        items = [
            # An item counts for every hash block that it touches.
            (item.item_id, item.start - start, min(round_up(item.start + item.length, block), end))
            for item in request.mm_items
            if item.start < end and start < round_up(item.start + item.length, block)
        ]
        salt = request.cache_salt if start == 0 else None
        embeds = None
        if request.prompt_embeds is not None and start < len(request.prompt_embeds):
            rows = np.ascontiguousarray(request.prompt_embeds[start:end])
            embeds = (str(rows.dtype), rows.shape, hashlib.blake2b(rows.tobytes(), digest_size=DIGEST_BYTES).digest())
        extra = (request.lora_name, items, salt, embeds)
        if extra == (None, [], None, None):
            return digest
        content = digest + repr(extra).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=self._secret, person=_EXTRA).digest()
