"""Decides what each step computes, one step ahead of the results.

Prefill, a chunk of it, a prefix hit, decode and recomputing after a preemption are one case here: a
sequence has `num_known` tokens, `num_computed` of them have K/V rows in pages, and a step computes some
of the rest. When it computes the last known token, the next one is sampled.

The plan of step N+1 is made before the ids of step N are on the host. This works because the plan needs
only counts: `schedule` advances the counters as if the step had run, the device feeds sampled ids to
itself, and `commit` brings the ids later. What turns out not to have been needed (a row of a sequence
that stopped or was aborted in between) is ignored by `commit`. Pages of such a row may be given back at
once, and reused by the next plan: the device runs steps in the order of their launch.

Not thread-safe; one thread owns it.
"""

from __future__ import annotations

import heapq
import logging
import math
from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np

from jaxserve.config import ResolvedConfig
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.request import ScheduledRow, Sequence, Status, StepPlan
from jaxserve.engine.waiting_queue import MAX_OVERTAKES, WaitingQueue, importance, remove_sorted
from jaxserve.errors import RequestError

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the page pool, the slots and the order of all live sequences.

    In deterministic mode a token's K/V comes from one shape whatever happens: prompt tokens only ever
    from prefill chunks, generated ones from single decode rows, also when they are recomputed.

    Attributes:
        pool: the page pool; its `stats` count prefix hits.
        block_tables: i32[max_num_seqs + 1, max_pages_per_seq], page ids by slot; see StepPlan.
        num_preemptions: since start.
    """

    def __init__(self, config: ResolvedConfig):
        assert config.max_num_batched_tokens >= config.query_block
        self.config = config
        self.pool = PagePool(config.num_pages, config.page_size, config.enable_prefix_caching)
        self.block_tables = np.zeros((config.max_num_seqs + 1, config.max_pages_per_seq), np.int32)
        self.num_preemptions = 0
        self._live: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # most important first
        self._free_slots = list(range(config.max_num_seqs))  # a heap
        # A deterministic hit ends where a block of prefill rows does, so that a block holds the same
        # tokens whether those before it were hit or computed.
        unit = math.lcm(config.page_size, config.query_block) if config.deterministic else config.page_size
        self._hit_unit = unit // config.page_size  # in pages

    # -- what is there

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def queue_room(self) -> int:
        """How many more sequences may be added now."""
        return max(0, self.config.max_waiting_requests - len(self._waiting))

    # -- arrivals and ends

    def add(self, seq: Sequence) -> None:
        """Queues a sequence, valid but for its pages; there is `queue_room` for it.

        Raises:
            RequestError: it can never run: it needs more pages than the pool has.
        """
        config, pool = self.config, self.pool
        assert seq.seq_id not in self._live and seq.status is Status.WAITING and self.queue_room
        assert 0 < seq.prompt_len < seq.max_len <= config.max_model_len
        assert not seq.options.priority or config.scheduling_policy == "priority"
        needed = pool.pages_for(seq.max_len - 1)  # the last token's K/V is never used
        if needed > pool.num_pages - 1:
            raise RequestError(
                f"prompt and output of up to {seq.max_len} tokens need {needed} KV pages of {config.page_size} "
                f"tokens, but the pool has {pool.num_pages - 1}; lower max_tokens, shorten the prompt or give "
                f"the engine more pages (num_pages, kv_cache_memory_bytes)", "max_tokens")
        self._live[seq.seq_id] = seq
        self._waiting.push(seq)

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence, whatever its state, and gives back all it holds. No effect on one that has ended."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            remove_sorted(self._running, seq, importance)
            self._release(seq)
        else:
            self._waiting.remove(seq)
        del self._live[seq.seq_id]
        seq.status = Status.FINISHED
        seq.num_sampled_in_flight = 0

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Running sequences go on, but publish nothing more."""
        self.pool.reset_prefix_cache()
        for seq in self._running:
            seq.publishes = False

    def requeue_all(self) -> None:
        """The device's pool is lost: every page is forgotten, and running sequences start again from
        their tokens. Results of steps launched before are void."""
        for seq in self._live.values():
            seq.num_sampled_in_flight = 0
            seq.generation += 1
        running, self._running = self._running, []
        for seq in running:
            self._to_queue(seq)
        self.pool.reset()

    def fail_all(self) -> None:
        """The device's pool is lost, for good: ends every sequence."""
        for seq in list(self._live.values()):
            self.finish(seq)
        self.pool.reset()

    # -- one step

    def schedule(self) -> StepPlan | None:
        """Plans the next step and advances the counters as if it had run.

        The plan must be launched, or `requeue_all`/`fail_all` called: its prompt pages can be hit from
        now on. `finish` and `commit` may come between.

        Returns None when nothing can be computed now: no work, or what there is waits for results in
        flight (commit them and call again).
        """
        budget = self.config.max_num_batched_tokens
        preemptions = self.num_preemptions
        decodes, prefilling = self._pick_running()
        # However many decode, one block of prefill goes on beside them.
        budget = max(budget - len(decodes), self.config.query_block)
        prefills: list[ScheduledRow] = []
        for seq in prefilling:
            chunk = self._chunk(seq, budget)
            if chunk and seq.status is Status.RUNNING and self._make_room(seq, chunk, decodes):
                prefills.append(self._prefill(seq, chunk))
                budget -= self._cost(chunk)
        admitted: list[Sequence] = []
        if self._waiting and self._free_slots and self.num_preemptions == preemptions:
            self._admit(decodes, prefills, admitted, budget)
        if not decodes and not prefills:
            return None
        if self.config.decode_steps > 1 and not prefills:
            rows = self._advance_many(decodes)
        else:
            rows = [self._advance(seq, 1) for seq in decodes]
        return StepPlan(
            decodes=tuple(rows), prefills=tuple(prefills),
            decode_steps=self.config.decode_steps if any(r.num_tokens > 1 for r in rows) else 1,
            admitted=tuple(admitted), block_tables=self.block_tables)

    def commit(self, plan: StepPlan, sampled: Mapping[int, list[int]]) -> list[tuple[Sequence, list[int]]]:
        """Takes the ids that a step sampled, in the order of launch.

        Args:
            sampled: ids by seq_id for the rows with `samples`; fewer, or none, of a row that failed on the way. A
                row's ids beyond its num_tokens are ignored, and rows of sequences that have ended since.

        Returns:
            (sequence, its new ids) for each row that brought ids, in the plan's order. Ids after the
            first one that ends the sequence are dropped; the sequence is FINISHED then.
        """
        results = []
        for row in plan.rows:
            seq = row.seq
            if not row.samples or seq.status is Status.FINISHED or seq.generation != row.generation:
                continue
            # A chunk samples one id, a decode row as many as it computes.
            count = row.num_tokens if plan.decode_steps > 1 else 1
            seq.num_sampled_in_flight -= count
            if ids := sampled[seq.seq_id][:count]:
                results.append((seq, self._append(seq, ids)))
        return results

    # -- checks

    def check_idle(self) -> bool:
        """Whether the books balance, looked at when nothing is live (True otherwise). If they do not,
        that is our bug: it is logged, and all pages and slots are taken back, so that serving goes on."""
        if self._live:
            return True
        try:
            self.check_invariants()
        except AssertionError as error:
            logger.error("idle scheduler is inconsistent, rebuilding it: %s", error)
            self.pool.reset()
            self._waiting, self._running = WaitingQueue(), []
            self._free_slots = list(range(self.config.max_num_seqs))
            return False
        return True

    def check_invariants(self) -> None:
        """Raises AssertionError unless pages, slots, block tables and queues agree with each other."""
        running = self._running
        self.pool.check_invariants([seq.pages for seq in running])
        if sorted(self._free_slots + [seq.slot for seq in running]) != list(range(self.config.max_num_seqs)):
            raise AssertionError("a slot is lost or held twice")
        if running != sorted(running, key=importance) or any(s.status is not Status.RUNNING for s in running):
            raise AssertionError("the running list is out of order")
        if sorted(seq.seq_id for seq in [*running, *self._waiting]) != sorted(self._live):
            raise AssertionError("a live sequence is in no queue, or in two")
        for seq in running:
            row = self.block_tables[seq.slot]
            if row[:len(seq.pages)].tolist() != seq.pages or row[len(seq.pages):].any():
                raise AssertionError(f"block table of slot {seq.slot} differs from its sequence's pages")
        if self.block_tables[-1].any():
            raise AssertionError("the dummy slot has pages")

    # -- running sequences

    def _pick_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Sorts running sequences into decode rows, for which pages are taken, and those with a prompt
        to compute. Sequences whose last id is in flight are left out."""
        decodes: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self._running.copy():
            if seq.status is not Status.RUNNING or self._is_drained(seq):
                continue
            if not self._is_decode(seq):
                prefilling.append(seq)
            elif self._make_room(seq, 1, decodes):
                decodes.append(seq)
        return decodes, prefilling

    def _is_drained(self, seq: Sequence) -> bool:
        """Whether nothing is left to compute: the ids in flight complete the sequence."""
        return seq.num_known >= seq.max_len

    def _is_decode(self, seq: Sequence) -> bool:
        """Whether the sequence's next row is a single decode row."""
        in_prompt = seq.num_computed < seq.prompt_len
        if self.config.deterministic:
            return not in_prompt
        # Logits of prompt positions are only computed for chunks.
        return seq.num_known - seq.num_computed == 1 and not (in_prompt and seq.options.prompt_logprobs is not None)

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens of the sequence's next chunk; all that are left, or a multiple of query_block."""
        end = seq.prompt_len if self.config.deterministic else seq.num_known
        return min(end - seq.num_computed, budget - budget % self.config.query_block)

    def _cost(self, chunk: int) -> int:
        """Rows of the prefill region that a chunk takes."""
        return chunk + -chunk % self.config.query_block

    def _make_room(self, seq: Sequence, num_tokens: int, decodes: list[Sequence]) -> bool:
        """Gets the pages for the next tokens of a running sequence, preempting others until they are
        there. False if that came down to the sequence itself.

        `decodes`: rows of this step so far, in order of importance; a victim's is taken out.
        """
        needed = self.pool.pages_for(seq.num_computed + num_tokens) - len(seq.pages)
        if needed <= 0:
            return True
        while needed > self.pool.num_free:
            victim = self._take_victim()
            if decodes and decodes[-1] is victim:
                decodes.pop()
            self._to_queue(victim)
            if victim is seq:
                assert self._running, "a sequence that passed `add` fits when it is alone"
                return False
        self._grow(seq, needed)
        return True

    def _take_victim(self) -> Sequence:
        """Takes out of the running list the sequence that gives up its pages: a drained one, which has no
        more use for them and only waits in the queue to be finished, else the least important."""
        for index, seq in enumerate(self._running):
            if self._is_drained(seq):
                return self._running.pop(index)
        self.num_preemptions += 1
        return self._running.pop()

    def _grow(self, seq: Sequence, num_pages: int) -> None:
        pages = self.pool.allocate(num_pages)
        held = len(seq.pages)
        self.block_tables[seq.slot, held:held + num_pages] = pages
        seq.pages += pages

    def _advance(self, seq: Sequence, num_tokens: int) -> ScheduledRow:
        start, end = seq.num_computed, seq.num_computed + num_tokens
        samples = end == seq.num_known
        seq.num_computed = end
        seq.num_sampled_in_flight += samples
        return ScheduledRow(seq, start, num_tokens, samples, seq.slot, seq.generation)

    def _prefill(self, seq: Sequence, chunk: int) -> ScheduledRow:
        row = self._advance(seq, chunk)
        # Already now, so that equal prompts in one step share: the step writes all its rows of a layer
        # before any row of that layer reads.
        self._publish(seq)
        return row

    def _advance_many(self, seqs: Seq[Sequence]) -> list[ScheduledRow]:
        """Decode rows of up to decode_steps tokens; fewer near the end and where pages are short."""
        rows = []
        for seq in seqs:
            start = seq.num_computed
            room = (len(seq.pages) + self.pool.num_free) * self.config.page_size - start
            count = min(self.config.decode_steps, seq.max_len - seq.num_known, room)
            needed = self.pool.pages_for(start + count) - len(seq.pages)
            if needed > 0:
                self._grow(seq, needed)
            seq.num_computed += count
            seq.num_sampled_in_flight += count
            rows.append(ScheduledRow(seq, start, count, True, seq.slot, seq.generation))
        return rows

    # -- admission

    def _admit(self, decodes: list[Sequence], prefills: list[ScheduledRow], admitted: list[Sequence],
               budget: int) -> None:
        """Starts waiting sequences, in order, while slots and budget last.

        One starts only when there are pages for all its known tokens, beside one more for each running
        sequence to grow into; else it would soon be preempted, its prefill in vain. One that lacks pages
        lets others pass, see MAX_OVERTAKES.
        """
        free = self.pool.num_free - len(self._running)
        passed: list[Sequence] = []
        for seq in self._waiting.window():
            if not self._free_slots or budget < self.config.query_block:
                return
            if seq.num_sampled_in_flight:  # of an earlier life; the device gets all ids anew, so not yet
                continue
            hit = self._lookup(seq)
            needed = self.pool.pages_for(len(seq.token_ids)) - len(hit) + self.pool.num_unused(hit)
            if needed > free:
                passed.append(seq)
                continue
            if any(other.overtaken >= MAX_OVERTAKES for other in passed):
                return
            for other in passed:
                other.overtaken += 1
            free -= needed + 1  # now it is one of those that grow
            self._start(seq, hit)
            admitted.append(seq)
            if self._is_decode(seq):
                self._make_room(seq, 1, decodes)
                decodes.append(seq)
                budget -= 1
            else:
                chunk = self._chunk(seq, budget)
                self._make_room(seq, chunk, decodes)
                prefills.append(self._prefill(seq, chunk))
                budget -= self._cost(chunk)

    def _start(self, seq: Sequence, hit: list[int]) -> None:
        """Moves a waiting sequence into a slot, with the pages of its prefix hit."""
        self._waiting.remove(seq)
        self.pool.acquire(hit)
        seq.pages = hit
        seq.num_published = len(hit)
        seq.num_computed = len(hit) * self.config.page_size
        seq.publishes = True
        seq.slot = heapq.heappop(self._free_slots)
        # Cleared here and not when the slot was given back: a plan not launched yet may use the old row.
        self.block_tables[seq.slot, len(hit):] = 0
        self.block_tables[seq.slot, :len(hit)] = hit
        if seq.status is Status.WAITING and self._reads_cache(seq):  # a recomputation is not a user's hit
            seq.num_cached_tokens = seq.num_computed
            self.pool.stats.query_tokens += seq.prompt_len
            self.pool.stats.hit_tokens += seq.num_computed
        seq.status = Status.RUNNING
        insort(self._running, seq, key=importance)

    def _to_queue(self, seq: Sequence) -> None:
        """Puts a sequence, already out of the running list, back to the front of its class. Its ids in
        flight stay expected: they are right whatever becomes of its pages."""
        self._release(seq)
        seq.status = Status.PREEMPTED
        self._waiting.push(seq)

    def _release(self, seq: Sequence) -> None:
        """Gives back pages and slot: the one way out of a slot."""
        self.pool.release(seq.pages)
        heapq.heappush(self._free_slots, seq.slot)
        seq.pages = []
        seq.slot = -1
        seq.num_computed = 0

    # -- prefix cache

    def _reads_cache(self, seq: Sequence) -> bool:
        """Prompt logprobs need the logits of every prompt position, so nothing may be skipped."""
        return self.config.enable_prefix_caching and seq.options.prompt_logprobs is None

    def _lookup(self, seq: Sequence) -> list[int]:
        if not self._reads_cache(seq):
            return []
        known = len(seq.token_ids)
        full = min(known - 1, seq.prompt_len if self.config.deterministic else known) // self.config.page_size
        self._extend_hashes(seq, full)
        hit = self.pool.lookup(seq.page_hashes, known)
        return hit[:len(hit) - len(hit) % self._hit_unit]

    def _publish(self, seq: Sequence) -> None:
        """Offers the sequence's full pages whose ids are on the host and whose K/V a launched step, or
        the one being planned, has written. In deterministic mode only pages of prompt tokens."""
        known = seq.prompt_len if self.config.deterministic else len(seq.token_ids)
        full = min(seq.num_computed, known) // self.config.page_size
        if full <= seq.num_published or not seq.publishes or not self.config.enable_prefix_caching:
            return
        self._extend_hashes(seq, full)
        for index in range(seq.num_published, full):
            self.pool.publish(seq.pages[index], seq.page_hashes[index])
        seq.num_published = full

    def _extend_hashes(self, seq: Sequence, num_pages: int) -> None:
        salt = seq.options.cache_salt
        self.pool.hasher.extend(seq.page_hashes, seq.token_ids, num_pages,
                                () if salt is None else (("cache_salt", salt),))

    # -- results

    def _append(self, seq: Sequence, ids: list[int]) -> list[int]:
        """Appends new ids up to the first that ends the sequence; returns those appended."""
        options = seq.options
        for index, token in enumerate(ids):
            seq.token_ids.append(token)
            num_output = len(seq.token_ids) - seq.prompt_len
            may_stop = num_output > options.min_tokens
            if (len(seq.token_ids) >= seq.max_len
                    or may_stop and (token in options.eos_ids or token in options.stop_ids)):
                self._publish(seq)
                self.finish(seq)
                return ids[:index + 1]
        self._publish(seq)
        return ids
