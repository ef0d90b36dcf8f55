"""A request as the manager sees it: its tokens and the caller's counters."""

import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dsv4kv_jax._integers import as_count

Status = Literal["waiting", "running", "preempted"]

NO_ROW = -1


class MultiModalItem(NamedTuple):
    """An item whose placeholder tokens are `[start, start + length)`; equal ids mean equal contents."""

    item_id: str
    start: int
    length: int


class Request:
    """Token ids and progress of one request.

    The counters are the caller's: the manager reads them and never changes them, except in `KVCacheManager.preempt`.
    What the request is made of stays as it is: its cached prefixes are found by it. A manager knows a request by its
    identity, so there is no copying one; pickling or deep-copying a manager takes its requests along.

    Attributes:
      request_id: names the request, also among those that hold blocks. Read only.
      token_ids: array of int32, the prompt and the tokens known to be kept; grows through `append` and never changes
        otherwise.
      num_prompt_tokens: tokens of the prompt.
      num_tokens: `len(token_ids)`.
      num_computed_tokens: tokens whose cache rows are written or scheduled to be, those in flight included.
      num_in_flight_tokens: the last of these, scheduled but not yet known to be kept.
      status: `"waiting"`, `"running"` or `"preempted"`; admission keeps the watermark only from the other two.
      shared_prefix_boundary: tokens some group found in its cache beyond the common hit; set by the last look-up.
      lora_name, mm_items, cache_salt, prompt_embeds: what besides the tokens decides a prefix's content (rule A8).
      skip_reading_prefix_cache: look-ups of this request find nothing.
    """

    __slots__ = (
        "_keys",
        "_manager",
        "_request_id",
        "_row",
        "cache_salt",
        "lora_name",
        "mm_items",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_embeds",
        "shared_prefix_boundary",
        "skip_reading_prefix_cache",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        *,
        lora_name: str | None = None,
        mm_items: Sequence[MultiModalItem] = (),
        cache_salt: str | None = None,
        prompt_embeds: np.ndarray | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        """A waiting request with nothing computed.

        Args:
          request_id: a name, unique among the requests that hold blocks.
          prompt_token_ids: int32 ids, at least one.
          lora_name: the adapter, if any.
          mm_items: multimodal items in prompt order.
          cache_salt: requests share prefixes only with requests of the same salt.
          prompt_embeds: [num_embedded_tokens, ...] embeddings of the first tokens of the prompt.
          skip_reading_prefix_cache: compute every token, but leave the prefix for others.

        Raises:
          ValueError: an id that is no string, an empty prompt, token ids that are not int32, or items or embeddings
            outside the prompt.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r} must be a string")
        self._request_id = request_id
        self.token_ids = array.array("i")
        self.num_tokens = 0
        self.append(prompt_token_ids)
        if not self.num_tokens:
            raise ValueError(f"request {request_id!r} has no prompt token; give at least one")
        self.num_prompt_tokens = self.num_tokens
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.status: Status = "waiting"
        self.shared_prefix_boundary = 0
        self.lora_name = lora_name
        self.mm_items = tuple(_checked_item(item, request_id, self.num_prompt_tokens) for item in mm_items)
        self.cache_salt = cache_salt
        shape = np.shape(prompt_embeds) if prompt_embeds is not None else (0,)
        if not shape or shape[0] > self.num_prompt_tokens:
            raise ValueError(
                f"request {request_id!r}: prompt_embeds has shape {shape}; it must have one row for each of the first "
                f"prompt tokens, at most {self.num_prompt_tokens}"
            )
        self.prompt_embeds = prompt_embeds
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self._row = NO_ROW  # of the block tables; kept by the manager
        self._manager: Any = None  # the manager that knows this request
        self._keys: Any = None  # its prefix keys

    @property
    def request_id(self) -> str:
        return self._request_id

    def append(self, token_ids: Iterable[int] | np.ndarray) -> None:
        """Adds tokens that are known to be kept.

        Raises:
          ValueError: ids that are not int32; nothing is added.
        """
        try:
            if isinstance(token_ids, np.ndarray):
                new = _array_of(token_ids)
            elif isinstance(token_ids, bytes | bytearray):  # an array would take four bytes for an id
                raise TypeError
            else:
                new = array.array("i", token_ids)
        except (TypeError, OverflowError):
            raise ValueError(f"request {self.request_id!r}: token ids must be a list of int32 numbers") from None
        self.token_ids += new
        self.num_tokens = len(self.token_ids)

    def __copy__(self) -> "Request":
        raise TypeError(
            f"request {self.request_id!r} cannot be copied, a manager knows it by its identity: make another Request"
        )

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens} of {self.num_tokens} tokens computed"
        return f"Request({self.request_id!r}, {progress}, {self.status})"


def _checked_item(item: Any, request_id: str, num_prompt_tokens: int) -> MultiModalItem:
    try:
        item = MultiModalItem(*item)
        start, length = as_count("start", item.start), as_count("length", item.length, at_least=1)
    except (TypeError, ValueError):
        raise ValueError(f"request {request_id!r}: {item!r} is no item of (item_id, start, length >= 1)") from None
    if start + length > num_prompt_tokens:
        raise ValueError(f"{item} lies outside the {num_prompt_tokens} prompt tokens of request {request_id!r}")
    return MultiModalItem(item.item_id, start, length)


def _array_of(token_ids: np.ndarray) -> array.array:
    limits = np.iinfo(np.int32)
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise TypeError
    if len(token_ids) and (token_ids.min() < limits.min or token_ids.max() > limits.max):
        raise OverflowError
    return array.array("i", token_ids.astype(np.int32).tobytes())
