"""Replays a trace of requests over a pool, block for block: how many run together, how many are preempted."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dsv4kv_jax import _json, capacity, holdings
from dsv4kv_jax.capacity import Mix
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.holdings import Schedule

if TYPE_CHECKING:
    from dsv4kv_jax.plan import KVCachePlan

_PROMPT_KEYS = ("prompt_tokens", "prompt", "input_tokens", "input_length")
_OUTPUT_KEYS = ("output_tokens", "output", "completion_tokens", "output_length")


class TraceRequest(NamedTuple):
    """One request: tokens of its prompt and tokens that it generates, at least one each."""

    prompt_tokens: int
    output_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What a replay saw.

    Attributes:
      steps: steps until every request was finished.
      mean_running: requests running, averaged over the steps in which others waited: the sustained concurrency. Over
        all steps if none ever waited.
      most_running: the largest number.
      preemptions: how often a request lost its blocks and had to start over, because those before it grew.
    """

    steps: int
    mean_running: float
    most_running: int
    preemptions: int


def read_trace(path: str) -> list[TraceRequest]:
    """Reads a trace: one request per line, in order of arrival.

    A line is `PROMPT OUTPUT` (blanks or a comma between), or a JSON object with `prompt_tokens` and `output_tokens`.
    Empty lines, lines starting with `#`, and a header line of words are skipped.

    Raises:
      PlanError: an unreadable file, a line that is neither, or no request at all; names the line.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read trace {path!r}: {error}") from None
    requests = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        words = text.replace(",", " ").split()
        if not text or text.startswith("#") or (not requests and all(word.isidentifier() for word in words)):
            continue
        try:
            is_object = text.startswith("{")
            prompt, output = _from_object(_json.parse(text, "it")) if is_object else [int(word) for word in words]
        except (ValueError, TypeError):
            raise PlanError(
                f"{path}:{number}: {text[:60]!r} is not a request; write 'PROMPT OUTPUT', or a JSON object with "
                f"prompt_tokens and output_tokens"
            ) from None
        if prompt < 1 or output < 1:
            raise PlanError(f"{path}:{number}: prompt {prompt} and output {output} must both be at least 1 token")
        requests.append(TraceRequest(prompt, output))
    if not requests:
        raise PlanError(f"trace {path!r} holds no request")
    return requests


def _from_object(data: dict[str, Any]) -> list[int]:
    values: list[int] = []
    for keys in (_PROMPT_KEYS, _OUTPUT_KEYS):
        value = next((data[key] for key in keys if key in data), None)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"none of {keys} is a number of tokens")
        values.append(value)
    return values


def as_mix(trace: Iterable[TraceRequest], at_most: int = 8) -> Mix:
    """The final lengths of a trace as a mix of a few, each rounded up, so that it costs no less."""
    lengths = np.sort([request.prompt_tokens + request.output_tokens for request in trace])
    parts = [part for part in np.array_split(lengths, at_most) if part.size]
    weights = collections.Counter()
    for part in parts:
        weights[int(part[-1])] += part.size
    return Mix.of(dict(weights))


def replay(plan: "KVCachePlan", trace: Sequence[TraceRequest], schedule: Schedule | None = None) -> Replay:
    """Runs a trace, all of whose requests wait from the start, to its end.

    In every step each running request decodes a token, in order of admission, and one request computes a chunk of its
    prompt. The next request is admitted when the one before has its prompt and the pool has room: for its whole prompt
    if the schedule reserves it. Where the pool runs dry, the newest request is preempted and later starts over with the
    tokens it has. Prefixes are not shared.

    Raises:
      PlanError: see `capacity.capacity`; or a request that could never finish, named by its position.
    """
    schedule = schedule or Schedule.of(plan)
    if not trace:
        raise PlanError("the trace holds no request")
    largest = max(range(len(trace)), key=lambda index: sum(trace[index]))
    if not capacity.capacity(plan, sum(trace[largest]), schedule).num_requests:
        raise PlanError(
            f"request {largest} of the trace grows to {sum(trace[largest])} tokens, which a pool of "
            f"{plan.num_blocks} blocks "
            f"can never admit; the longest that it can is {capacity.longest_context(plan, 1, schedule)} tokens"
        )
    return _Engine(plan, trace, schedule).run()


class _Engine:
    """One replay. Requests in `running` are in order of admission; only the last may still be prefilling."""

    def __init__(self, plan: "KVCachePlan", trace: Sequence[TraceRequest], schedule: Schedule) -> None:
        self.groups = plan.groups
        self.schedule = schedule
        self.free = plan.num_blocks - 1
        self.final = np.array([sum(request) for request in trace], np.int64)
        self.known = np.array([request.prompt_tokens for request in trace], np.int64)
        self.computed = np.zeros(len(trace), np.int64)
        self.held = np.zeros(len(trace), np.int64)
        self.waiting = collections.deque(range(len(trace)))
        self.running: list[int] = []
        self.preemptions = 0

    def run(self) -> Replay:
        counts: list[tuple[int, bool]] = []
        while self.waiting or self.running:
            self._admit()
            self._step()
            counts.append((len(self.running), bool(self.waiting)))
            self._finish()
        saturated = [running for running, waited in counts if waited] or [running for running, _ in counts]
        return Replay(
            steps=len(counts),
            mean_running=float(np.mean(saturated)),
            most_running=max(running for running, _ in counts),
            preemptions=self.preemptions,
        )

    def _admit(self) -> None:
        prefilling = bool(self.running) and self.computed[self.running[-1]] < self.known[self.running[-1]] - 1
        if not self.waiting or prefilling:
            return
        request = self.waiting[0]
        charge = holdings.reserved_blocks(self.groups, int(self.known[request]), self.schedule)
        if not self.schedule.reserve_full_sequence or sum(charge) <= self.free:
            self.running.append(self.waiting.popleft())

    def _step(self) -> None:
        """Gives every running request the blocks of its step, in order; preempts the newest until they suffice."""
        while True:
            requests = np.array(self.running, np.int64)
            new = np.minimum(self.known[requests] - self.computed[requests], self.schedule.chunk_tokens)
            wanted = self._blocks(requests, new)
            taken = np.cumsum(wanted - self.held[requests])
            if not requests.size or taken.max() <= self.free:
                break
            self._preempt()
        self.held[requests] = wanted
        self.computed[requests] += new
        self.free -= int(taken[-1]) if requests.size else 0
        caught_up = requests[self.computed[requests] == self.known[requests]]
        self.known[caught_up] += 1  # a token was sampled

    def _blocks(self, requests: np.ndarray, new: np.ndarray) -> np.ndarray:
        computed = self.computed[requests]
        unsettled = np.where(new > 1, self.schedule.unsettled_chunk_tokens, self.schedule.unsettled_decode_tokens)
        unsettled = np.minimum(unsettled, computed)
        held = [holdings.held_blocks(group, computed, new, unsettled, self.schedule) for group in self.groups]
        return np.sum(held, axis=0)

    def _preempt(self) -> None:
        request = self.running.pop()
        self.free += int(self.held[request])
        self.held[request] = self.computed[request] = 0
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _finish(self) -> None:
        # The last token is sampled but never computed.
        done = [request for request in self.running if self.known[request] >= self.final[request]]
        for request in done:
            self.running.remove(request)
            self.free += int(self.held[request])
            self.held[request] = 0
