"""Random schedules against a model of the device: every query must read its own prefix, whatever happened meanwhile.

The model keeps what each block's rows hold. Steps overlap: up to two are scheduled before the first one runs. A step
may carry draft tokens, of which any number is rejected when it has run; requests are preempted, aborted and started
again, share prefixes, and load prefixes from elsewhere. A row's content is the group and the whole token prefix behind
it, so a block that was freed too early, given to two requests, hit wrongly or filled by somebody else shows when read.
"""

import dataclasses
import os

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manager_support import add, groups

from dsv4kv_jax.manager import KVCacheManager

SHAPES = (
    ((256, None), (64, 128), (64, 128), (8, 128), (4, 8)),
    ((16, None), (8, 12), (4, 8)),
    ((8, None), (4, 10), (4, 10), (2, 3)),
    ((8, 20),),
)
FULL_SHAPES = (((8, None), (4, None)), ((16, None),))  # hits may end inside a block
DOCUMENTS = ([1] * 700, [2] * 700, [1] * 40 + [2] * 660)
GARBAGE = "garbage"  # a row that no query may read
MAX_TOKENS = 800
# Every example is one schedule of up to 40 operations; set the variable for a long campaign.
EXAMPLES = int(os.environ.get("DSV4KV_SCHEDULES", "150"))


@dataclasses.dataclass(eq=False)
class Run:
    """A request between its admission and its end or preemption; `settled` counts tokens that are written and kept."""

    settled: int = 0


@dataclasses.dataclass(eq=False)
class Entry:
    """One request's part of a scheduled step."""

    user: "User"
    run: Run
    count: int  # tokens, drafts included
    tables: tuple[list[int], ...]
    loaded: range  # positions whose rows come from elsewhere

    @property
    def alive(self):
        """Whether the result of the step will be used."""
        return self.user.run is self.run


@dataclasses.dataclass(eq=False)
class Step:
    entries: list[Entry]
    fill: list[int]  # blocks to fill with the canary or zeros first
    copies: list[tuple[int, int]]


class User:
    """A request and what it will turn out to say."""

    def __init__(self, request, truth):
        self.request, self.truth, self.run = request, truth, Run()

    def __repr__(self):
        return f"<{self.request!r}, {self.settled} settled>"

    @property
    def settled(self):
        return self.run.settled

    def content(self, group, position):
        return group, hash(tuple(self.truth[: position + 1]))


class Schedules(RuleBasedStateMachine):
    choices = SHAPES

    @initialize(
        choice=st.integers(0, 59),
        num_blocks=st.integers(8, 60) | st.integers(8, 400),
        caching=st.booleans() | st.just(True),
        draft=st.none() | st.integers(0, 3),
        retention=st.none() | st.integers(0, 2),
        partial=st.booleans() | st.just(True),
    )
    def start(self, choice, num_blocks, caching, draft, retention, partial):
        shapes = self.choices[choice % len(self.choices)]
        sliding = any(window for _, window in shapes)
        made = groups(*shapes, draft=draft)
        segment = int(np.lcm.reduce([size for size, _ in shapes]))
        self.manager = KVCacheManager(
            groups=made,
            num_blocks=num_blocks,
            max_model_len=MAX_TOKENS,
            max_in_flight_tokens=64,
            max_requests=5,
            enable_caching=caching,
            retention_interval=None if retention is None or not sliding else retention * segment,
            partial_hits=partial and not sliding,
            prefix_match_unit=2 if partial and not sliding else None,
            needs_zeroing=True,
            record_table_updates=True,
            debug=True,
        )
        self.shapes = shapes
        self.memory = [{} for _ in range(num_blocks)]  # row in block to content
        self.steps = []
        self.users = []
        self.popped = []  # (ids, entries that may still write them)
        self.new_entries = []
        self.device_tables = np.zeros_like(self.manager.tables.data)
        self.names = 0

    # What the scheduler does

    @precondition(lambda self: len(self.users) < 5)
    @rule(
        document=st.integers(0, 2),
        shared=st.integers(1, 300),
        own=st.just(0) | st.integers(0, 60),
        skip=st.integers(0, 9),
    )
    def arrive(self, document, shared, own, skip):
        self.names += 1
        prompt = DOCUMENTS[document][:shared] + [100 + self.names % 3] * own
        request = add(self.manager, f"r{self.names}", prompt, skip_reading_prefix_cache=skip == 0)
        self.users.append(User(request, prompt + [7 + self.names % 2] * (MAX_TOKENS - len(prompt))))

    @precondition(lambda self: self.waiting())
    @rule(
        data=st.data(),
        new=st.integers(1, 64),
        external=st.integers(-40, 40),
        whole=st.booleans(),
        look=st.integers(0, 3),
    )
    def admit(self, data, new, external, whole, look):
        self.admit_one(data.draw(st.sampled_from(self.waiting())), new, external, whole, look)

    def admit_one(self, user, new, external, whole, look):
        request, manager = user.request, self.manager
        hits = manager.get_computed_blocks(request)
        external = max(0, min(external, request.num_tokens - hits.num_tokens - 1))
        total = hits.num_tokens + external
        new = min(new, request.num_tokens - total)
        before = self.picture()
        result = manager.allocate_slots(
            request,
            new,
            new_computed_blocks=hits,
            num_external_computed_tokens=external,
            num_lookahead_tokens=look,
            full_sequence_must_fit=whole,
        )
        if result is None:
            assert self.picture() == before
            return
        user.run = Run(total)
        self.schedule(user, new, range(hits.num_tokens, total))
        request.num_computed_tokens, request.num_in_flight_tokens, request.status = total + new, new, "running"

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), new=st.integers(1, 64), look=st.integers(0, 4))
    def advance(self, data, new, look):
        user = data.draw(st.sampled_from(self.ready()))
        count = self.next_tokens(user, new, look)
        before = self.picture()
        result = self.manager.allocate_slots(user.request, count, num_lookahead_tokens=look)
        self.scheduled(user, count, result is None, before)

    @precondition(lambda self: self.users)
    @rule(
        data=st.data(), look=st.integers(0, 4), new=st.integers(1, 64), times=st.integers(1, 8), overlap=st.booleans()
    )
    def tick(self, data, look, new, times, overlap):
        """What a scheduler does most: steps of everything that runs, one in flight while the next is put together."""
        for _ in range(times):
            if self.waiting():
                self.admit_one(self.waiting()[0], new, 0, False, look)
            self.advance_all(look, new)
            if self.new_entries and len(self.steps) < 2:
                self.launch()
            while len(self.steps) > overlap:
                self.run(data)

    def advance_all(self, look, new):
        users = self.ready()
        counts = [self.next_tokens(user, new, look) for user in users]
        before = self.picture()
        batch = self.manager.allocate_batch([u.request for u in users], counts, num_lookahead_tokens=look)
        for index, (user, count) in enumerate(zip(users, counts, strict=True)):
            refused = batch.new_blocks(index) is None
            assert refused == (index in batch.refused)
            self.scheduled(user, count, refused, before if len(batch.refused) == len(users) else None)

    @precondition(lambda self: self.new_entries and len(self.steps) < 2)
    @rule()
    def launch_now(self):
        self.launch()

    def launch(self):
        """Closes a step: everything the device needs is drained once."""
        fill = [*self.manager.take_canary_block_ids().tolist(), *self.manager.take_new_block_ids_to_zero().tolist()]
        for row, column, block in self.manager.take_table_updates().tolist():
            self.device_tables[row, column] = block
        assert (self.device_tables == self.manager.tables.data).all()
        self.steps.append(Step(self.new_entries, fill, self.manager.take_cow_copies()))
        self.new_entries = []

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def run_oldest(self, data):
        self.run(data)

    def run(self, data):
        """The oldest step runs on the device; then it is known which drafts were kept."""
        step = self.steps.pop(0)
        for block in step.fill:
            self.memory[block] = {}
        for source, destination in step.copies:
            self.memory[destination] = dict(self.memory[source])
        kept = {}
        for entry in step.entries:
            start = entry.run.settled
            known = max(min(entry.user.request.num_tokens - start, entry.count), 0)
            kept[entry] = data.draw(st.integers(max(known, 1), entry.count)) if entry.count > known else entry.count
            for position in (*entry.loaded, *range(start, start + entry.count)):
                rejected = position >= start + kept[entry]
                self.write(entry, position, GARBAGE if rejected else None)
        for entry in step.entries:
            for position in range(entry.run.settled, entry.run.settled + kept[entry]):
                self.read(entry, position)
        self.manager.finish_cow_copies(step.copies)
        for entry in step.entries:
            self.settle(entry, kept[entry])
        self.popped = [(ids, [e for e in entries if e not in step.entries]) for ids, entries in self.popped]
        for ids, entries in self.popped:
            if not entries:
                self.manager.free_popped_blocks(ids)
        self.popped = [(ids, entries) for ids, entries in self.popped if entries]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), finish=st.booleans())
    def stop(self, data, finish):
        """A request finishes or is preempted, perhaps while a step still writes its blocks."""
        user = data.draw(st.sampled_from(self.running()))
        writing = [entry for entry in self.entries() if entry.user is user and entry.alive]
        if writing:
            self.popped.append((self.manager.pop_blocks_for_free(user.request), writing))
        self.manager.preempt(user.request)
        user.run = Run()
        if finish:
            self.users.remove(user)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def slide(self, data):
        user = data.draw(st.sampled_from(self.running()))
        self.manager.remove_skipped_blocks(user.request, user.settled)

    @rule(data=st.data(), everything=st.booleans())
    def forget(self, data, everything):
        pool = self.manager.pool
        if everything:
            assert self.manager.reset_prefix_cache() == (pool.num_free_blocks == pool.num_blocks - 1)
        else:
            self.manager.evict_blocks(data.draw(st.lists(st.integers(1, pool.num_blocks - 1), max_size=3)))

    # What must hold

    @invariant()
    def the_books_agree(self):
        if hasattr(self, "manager"):
            self.manager.check()

    @invariant()
    def no_block_has_two_writers(self):
        writers = {}
        for user in self.running() if hasattr(self, "manager") else ():
            for (size, _), table in zip(self.shapes, self.manager.get_block_ids(user.request), strict=True):
                for block in filter(None, table[user.settled // size :]):
                    assert writers.setdefault(block, user) is user, f"{user} and {writers[block]} write block {block}"

    @invariant()
    def pending_queries_keep_their_blocks(self):
        for entry in self.entries() if hasattr(self, "manager") else ():
            if not entry.alive:
                continue
            now = self.manager.get_block_ids(entry.user.request)
            for group, (size, window) in enumerate(self.shapes):
                oldest = 0 if window is None else max(0, entry.user.settled - window + 1)
                assert now[group][oldest // size : len(entry.tables[group])] == entry.tables[group][oldest // size :]

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for user in self.users:
            self.manager.pop_blocks_for_free(user.request)
        loans = self.manager.blocks.loans
        self.manager.finish_cow_copies([])
        self.manager.blocks.return_loans(np.arange(len(loans)).repeat(loans))
        self.manager.check()
        assert self.manager.pool.num_free_blocks == self.manager.pool.num_blocks - 1
        assert not self.manager.tables.data.any()

    # Helpers

    def entries(self):
        return [*(entry for step in self.steps for entry in step.entries), *self.new_entries]

    def waiting(self):
        return [user for user in self.users if user.request.request_id not in self.manager.active]

    def running(self):
        return [user for user in self.users if user.request.request_id in self.manager.active]

    def ready(self):
        """Running requests that may join the step being put together."""
        busy = {entry.user for entry in self.new_entries}
        return [u for u in self.running() if u not in busy and u.request.num_computed_tokens + 8 < MAX_TOKENS]

    def next_tokens(self, user, new, drafts):
        request = user.request
        left = request.num_tokens - request.num_computed_tokens
        return min(new, left) if left > 0 else 1 + min(drafts, 3)

    def schedule(self, user, count, loaded=range(0)):
        self.new_entries.append(Entry(user, user.run, count, self.manager.get_block_ids(user.request), loaded))

    def scheduled(self, user, count, refused, before):
        if refused:
            if before is not None:
                after = self.picture()
                assert after["free"] >= before["free"]  # windows may have slid
                assert after["others"].keys() == before["others"].keys()
            return
        self.schedule(user, count)
        user.request.num_computed_tokens += count
        user.request.num_in_flight_tokens += count

    def settle(self, entry, kept):
        user, request = entry.user, entry.user.request
        entry.run.settled += kept
        if not entry.alive:
            return
        request.num_in_flight_tokens -= entry.count
        request.num_computed_tokens -= entry.count - kept
        if user.settled >= request.num_tokens:  # the step also sampled the token behind the last one it kept
            request.append(user.truth[request.num_tokens : user.settled + 1])

    def picture(self):
        tables = {name: self.manager.get_block_ids(request) for name, request in self.manager.active.items()}
        return {"free": self.manager.pool.num_free_blocks, "others": tables, "keys": self.manager.pool.num_cached_keys}

    def write(self, entry, position, content):
        for group, (size, _) in enumerate(self.shapes):
            block = entry.tables[group][position // size]
            if block:
                self.memory[block][position % size] = content or entry.user.content(group, position)

    def read(self, entry, position):
        for group, (size, window) in enumerate(self.shapes):
            for seen in range(0 if window is None else max(0, position - window + 1), position + 1):
                block = entry.tables[group][seen // size]
                assert block, (
                    f"the query at {position} of {entry.user.request} sees a freed block, group {group}, {seen}"
                )
                assert self.memory[block].get(seen % size) == entry.user.content(group, seen), (
                    f"the query at {position} of {entry.user.request} reads other rows at {seen}, group {group}"
                )


class CopyOnWrite(Schedules):
    choices = FULL_SHAPES


COMMON = settings(
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(COMMON, max_examples=EXAMPLES)
TestCopyOnWrite = CopyOnWrite.TestCase
TestCopyOnWrite.settings = settings(COMMON, max_examples=EXAMPLES // 3)
