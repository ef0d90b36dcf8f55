"""A step's tokens, cut into groups that share one reading of their request's keys."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """A step's tokens cut into tiles of at most `size` neighbouring tokens of one request.

    Attributes:
      size: most tokens of a tile.
      query_start_loc: int32 `[R + 1]`.
      num_tokens: T.
      request: int32 `[N]`, the tile's request; R for tiles without tokens.
      first: int32 `[N]`, its first token.
      before: int32 `[R]`, how many tiles belong to earlier requests; None where tiles are single tokens.
    """

    size: int
    query_start_loc: jax.Array
    num_tokens: int
    request: jax.Array
    first: jax.Array
    before: jax.Array | None

    @classmethod
    def cut(cls, query_start_loc: jax.Array, num_tokens: int, most: int) -> "Tiles":
        """Tiles of `most` tokens, or fewer where requests have fewer on average: a decode step's are single tokens."""
        num_requests = query_start_loc.shape[0] - 1
        size = max(min(num_tokens // num_requests, most), 1)
        starts, stops = query_start_loc[:-1], query_start_loc[1:]
        if size == 1:
            first, before = jnp.arange(num_tokens, dtype=jnp.int32), None
            request = _count_past(stops, first)
        else:
            tiles_of = (stops - starts + (size - 1)) // size
            last = jnp.cumsum(tiles_of, dtype=jnp.int32)
            before = last - tiles_of
            tile = jnp.arange((num_tokens + num_requests * (size - 1)) // size, dtype=jnp.int32)
            request = _count_past(last, tile)
            first = _take(starts, request) + (tile - _take(before, request)) * size
        return cls(
            size=size,
            query_start_loc=query_start_loc,
            num_tokens=num_tokens,
            request=request,
            first=first,
            before=before,
        )

    @property
    def stop(self) -> jax.Array:
        """int32 `[N]`: the token after the tile's last one; for a single token, also if it belongs to no request."""
        if self.before is None:
            return self.first + 1
        return jnp.minimum(self.first + self.size, _take(self.query_start_loc[1:], self.request))

    @property
    def tokens(self) -> jax.Array:
        """int32 `[N, size]`: the tokens of each tile; T where there is none."""
        tokens = self.first[:, None] + jnp.arange(self.size, dtype=jnp.int32)
        exists = (tokens < self.stop[:, None]) & (self.request < self.query_start_loc.shape[0] - 1)[:, None]
        return jnp.where(exists, tokens, self.num_tokens)

    def largest(self, values: jax.Array) -> jax.Array:
        """int32 `[N]`: the largest of the values, int32 `[T]`, of each tile's tokens; any for tiles without tokens."""
        if self.before is None:
            return values
        return jnp.max(values.at[self.tokens].get(mode="fill", fill_value=0), axis=1)

    def by_token(self, rows: jax.Array) -> jax.Array:
        """Rows `[N * size, ...]`, one for each place of `tokens`, as `[T, ...]`; anything for tokens of no tile."""
        if self.before is None:
            return rows
        token = jnp.arange(self.num_tokens, dtype=jnp.int32)
        owner = _count_past(self.query_start_loc[1:], token)
        place = _take(self.before, owner) * self.size + token - _take(self.query_start_loc[:-1], owner)
        return rows.at[place].get(mode="clip")


def _count_past(stops: jax.Array, position: jax.Array) -> jax.Array:
    """How many of the non-decreasing `stops` each position is past, by looking at all: one small kernel on a GPU."""
    return jnp.sum(position[:, None] >= stops[None, :], axis=1, dtype=jnp.int32)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[index].get(mode="fill", fill_value=0)
