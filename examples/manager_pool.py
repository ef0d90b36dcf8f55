"""Fifty requests through a small pool: shared prefixes, refusals, preemption, and what the tables look like.

Runs anywhere, no device needed: `python examples/manager_pool.py`.

The scheduler below is the least that works. Each step it decodes one token for every running request, preempts the
youngest ones if blocks run out, then continues a prompt, or admits the next waiting request, in chunks.
"""

import collections
import random

import dsv4kv_jax as dsv4
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.request import Request

NUM_REQUESTS, NUM_BLOCKS, CHUNK, MAX_RUNNING = 50, 280, 128, 8
SYSTEM_PROMPTS = [[number] * 600 for number in range(3)]  # most requests start with one of these

plan = dsv4.plan(
    dsv4.ModelConfig.preset("deepseek-v4-pro"),
    memory_bytes=1,
    num_gpu_blocks_override=NUM_BLOCKS,
    max_model_len=2048,
    max_in_flight_tokens=CHUNK,
)
manager = KVCacheManager(plan, max_requests=MAX_RUNNING, debug=True)
rng = random.Random(0)
waiting: collections.deque[Request] = collections.deque()
for number in range(NUM_REQUESTS):
    own = [rng.randrange(1000) for _ in range(rng.randrange(20, 300))]
    request = Request(f"r{number}", rng.choice(SYSTEM_PROMPTS) + own)
    manager.add_request(request)
    waiting.append(request)
answers = {request.request_id: rng.randrange(5, 80) for request in waiting}
running: list[Request] = []
steps = preemptions = 0


def done(request: Request) -> bool:
    return request.num_tokens - request.num_prompt_tokens >= answers[request.request_id]


def prefilling(request: Request) -> bool:
    return request.num_computed_tokens < request.num_tokens - 1


def advance(request: Request, count: int) -> None:
    """The step ran: its tokens are computed, and if it reached the end, it sampled the next token."""
    request.num_computed_tokens += count
    if request.num_computed_tokens == request.num_tokens:
        request.append([rng.randrange(1000)])


def prefill(request: Request) -> bool:
    """Computes the next chunk of a request; False if too few blocks are free."""
    first = request.status != "running"
    hits = manager.get_computed_blocks(request) if first else None
    computed = hits.num_tokens if hits else request.num_computed_tokens
    count = min(CHUNK, request.num_tokens - computed)
    if manager.allocate_slots(request, count, new_computed_blocks=hits) is None:
        return False
    request.num_computed_tokens, request.status = computed, "running"
    advance(request, count)
    return True


def preempt_youngest() -> None:
    global preemptions
    victim = running.pop()
    manager.preempt(victim)
    waiting.appendleft(victim)
    preemptions += 1


def show() -> None:
    """The tables as the device sees them: per group, how many blocks have been let go and which are held."""
    sizes = ", ".join(str(rules.block_size) for rules in manager.rules)
    print(f"step {steps}: {len(running)} running, {len(waiting)} waiting, {manager.usage:.0%} of the pool in use")
    print(f"   tables of the groups with {sizes} tokens a block: blocks let go, first blocks held")
    for request, *tables in zip(running, *manager.block_tables(running), strict=True):
        cells = []
        for table, full in zip(tables, manager.get_block_ids(request), strict=True):
            held = [int(block) for block in table[: len(full)] if block]
            ids = " ".join(map(str, held[:3])) + (" .." if len(held) > 3 else "")
            cells.append(f"{len(full) - len(held):>3} gone, {ids:<14}")
        print(f"  {request.request_id:>4} {request.num_computed_tokens:>4} tokens | " + "| ".join(cells))


while waiting or running:
    decoding = [request for request in running if not prefilling(request)]
    while decoding and (result := manager.allocate_batch(decoding, 1)).refused:
        # Those that got their block run; the youngest request gives way to those that did not.
        refused = set(result.refused)
        for index, request in enumerate(decoding):
            if index not in refused:
                advance(request, 1)
        preempt_youngest()
        decoding = [request for index, request in enumerate(decoding) if index in refused and request in running]
    for request in decoding:
        advance(request, 1)
    chunked = next((request for request in running if prefilling(request)), None)
    if chunked is not None:
        while not prefill(chunked) and running[-1] is not chunked:
            preempt_youngest()
    elif waiting and len(running) < MAX_RUNNING and prefill(waiting[0]):
        running.append(waiting.popleft())
    manager.take_new_block_ids_to_zero()  # a real step zeroes these before it writes
    manager.check()
    if steps % 100 == 50:
        show()
    for request in [request for request in running if done(request)]:
        manager.free(request)
        running.remove(request)
    steps += 1

stats = manager.stats()
print(
    f"{NUM_REQUESTS} requests in {steps} steps with {preemptions} preemptions; {stats.hit_rate:.0%} of their tokens "
    f"were found in the prefix cache; {stats.evictions} cached blocks evicted; {stats.num_free_blocks} of "
    f"{stats.num_blocks} blocks are free, and block 0 is nobody's"
)
