"""Whatever happens to requests, each finishes with the ids it has alone, and nothing leaks."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from jaxserve.engine.request import Status
from jaxserve.engine.waiting_queue import MAX_OVERTAKES
from jaxserve.errors import RequestError

# Requests and options are drawn from a seed: plain data makes long histories cheap, and what hypothesis is
# good at, the order of events, is left to it.
randoms = st.integers(0, 2**32).map(random.Random)

SHARED_PREFIXES = [[1] * 40, [2, 3] * 20, [1] * 8 + [4] * 32]


def draw_config(rng: random.Random) -> dict:
    block = rng.choice([1, 4, 8])
    page_size = rng.choice([2, 4])
    deterministic = rng.random() < 0.4
    return dict(
        page_size=page_size, query_block=block, max_num_batched_tokens=block + rng.randint(0, 30),
        max_model_len=rng.randint(24, 48), num_pages=rng.choice([rng.randint(30, 60), 120]) // page_size,
        max_num_seqs=rng.randint(1, 8), max_waiting_requests=rng.choice([3, 40, 40]),
        enable_prefix_caching=rng.random() < 0.8, deterministic=deterministic,
        decode_steps=1 if deterministic else rng.choice([1, 1, 3]),
        scheduling_policy=rng.choice(["fcfs", "priority"]), depth=rng.choice([1, 1, 2]))


def draw_request(rng: random.Random) -> tuple[list[int], dict]:
    prompt = rng.choice(SHARED_PREFIXES)[:rng.randint(0, 24)] + [rng.randint(0, 9) for _ in range(rng.randint(1, 6))]
    return prompt, dict(
        max_tokens=rng.randint(1, rng.choice([4, 30])), min_tokens=rng.randint(0, 3),
        eos_ids=frozenset(rng.choice([(), (), (1, 2)])), stop_ids=frozenset(rng.choice([(), (), range(2, 50, 7)])),
        seed=rng.randint(0, 1), priority=rng.choice([0, 0, -1, 2]), cache_salt=rng.choice([None, None, "a"]),
        prompt_logprobs=rng.choice([None, None, None, 1]))


class Requests(RuleBasedStateMachine):
    def __init__(self, make_loop, make_seq, solo_run):
        super().__init__()
        self.make_loop, self.make_seq, self.solo_run = make_loop, make_seq, solo_run
        self.seqs, self.ended_early, self.overtaken = [], set(), Counter()

    @initialize(rng=randoms)
    def start(self, rng):
        self.config = draw_config(rng)
        self.loop = self.make_loop(**self.config)
        self.scheduler = self.loop.scheduler

    @rule(rng=randoms, count=st.integers(1, 8), n=st.sampled_from([1, 1, 3]))
    def arrive(self, rng, count, n):
        for _ in range(count):
            prompt, options = draw_request(rng)
            for index in range(n):
                self.add(prompt, options | {"seed": 10 * options["seed"] + index})

    def add(self, prompt, options):
        """With what the processor and the core see to before the scheduler is asked."""
        config = self.config
        if config["scheduling_policy"] != "priority":
            options = options | {"priority": 0}
        left = config["max_model_len"] - len(prompt)
        if left < 1 or not self.scheduler.queue_room:
            return
        seq = self.make_seq(len(self.seqs), prompt, **options | {"max_tokens": min(options["max_tokens"], left)})
        pages = -(-(seq.max_len - 1) // config["page_size"])
        if pages >= config["num_pages"]:
            with pytest.raises(RequestError, match=f"need {pages} KV pages"):
                self.scheduler.add(seq)
        else:
            self.scheduler.add(seq)
            self.seqs.append(seq)

    @rule(times=st.integers(1, 12), commit_before_launch=st.booleans())
    def run_steps(self, times, commit_before_launch):
        for _ in range(times):
            self.step(commit_before_launch)

    def step(self, commit_before_launch=False):
        scheduler = self.scheduler
        waiting = [seq for seq in self.seqs if seq.status is Status.WAITING]
        preemptions = scheduler.num_preemptions
        plan = self.loop.step(commit_before_launch)
        if plan is None:
            return
        self.check_budget(plan)
        if scheduler.num_preemptions > preemptions:
            assert not plan.admitted, "a step that preempts admits nobody"
        for position, seq in enumerate(waiting):
            if seq.status is Status.WAITING:
                passed_by = [other for other in waiting[position + 1:] if other in plan.admitted
                             and other.options.priority >= seq.options.priority]
                self.overtaken[seq] += len(passed_by)
                assert self.overtaken[seq] <= MAX_OVERTAKES

    def check_budget(self, plan):
        config, block = self.config, self.config["query_block"]
        costs = [-(-row.num_tokens // block) * block for row in plan.prefills]
        assert len(plan.decodes) + len(plan.prefills) <= config["max_num_seqs"]
        assert sum(costs) <= max(block, config["max_num_batched_tokens"] - len(plan.decodes))
        assert plan.decode_steps == 1 or not plan.prefills
        for row in plan.decodes:
            in_prompt = row.start < row.seq.prompt_len
            assert not in_prompt or (not config["deterministic"] and row.seq.options.prompt_logprobs is None)
            assert 1 <= row.num_tokens <= plan.decode_steps
        for row in plan.prefills:
            end = row.start + row.num_tokens
            assert row.num_tokens % block == 0 or row.samples or (
                config["deterministic"] and end == row.seq.prompt_len), "a chunk with waste in its middle"
            assert not config["deterministic"] or end <= row.seq.prompt_len

    @rule(pick=st.integers(0, 1000))
    def end_one(self, pick):
        """An abort, which may hit any state, or a stop string in the text so far."""
        if not self.seqs:
            return
        seq = self.seqs[pick % len(self.seqs)]
        ended = seq.status is Status.FINISHED
        self.scheduler.finish(seq)
        assert seq.status is Status.FINISHED
        if not ended:
            self.ended_early.add(seq)

    @rule(event=st.sampled_from(["drain"] * 4 + ["new parameters"] * 3 + ["pool lost"] * 2 + ["all fail"]))
    def something_rare(self, event):
        if event == "drain":
            self.loop.drain()
        elif event == "new parameters":
            self.scheduler.reset_prefix_cache()
            self.loop.device.params += 1
        else:
            self.lose_pool(event == "all fail")

    def lose_pool(self, all_fail):
        self.loop.device.lose_pool()
        if all_fail:
            self.ended_early.update(seq for seq in self.seqs if seq.status is not Status.FINISHED)
            self.scheduler.fail_all()
            assert not self.loop.has_work
        else:
            self.scheduler.requeue_all()
        for _, sampled in self.loop.in_flight:  # what was computed is garbage, and must be ignored
            sampled.update({seq_id: [-1] * len(ids) for seq_id, ids in sampled.items()})

    @invariant()
    def books_balance(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(4000):
            if not self.loop.has_work and not self.loop.in_flight:
                break
            self.step()
        assert self.scheduler.check_idle() and self.scheduler.pool.num_free == self.config["num_pages"] - 1
        for seq in self.seqs:
            assert seq.status is Status.FINISHED
            ids = self.solo_run(seq)
            assert seq.token_ids == (ids[:len(seq.token_ids)] if seq in self.ended_early else ids)


def test_any_history_of_requests_ends_with_the_ids_of_solo_runs(make_loop, make_seq, solo_run):
    run_state_machine_as_test(lambda: Requests(make_loop, make_seq, solo_run),
                              settings=settings(max_examples=100, stateful_step_count=30))


@pytest.mark.parametrize("seed", range(30))
def test_a_busy_engine_gives_the_ids_of_solo_runs(make_loop, make_seq, solo_run, seed):
    """The same machine under steady load: histories longer than hypothesis draws them."""
    rng = random.Random(seed)
    engine = Requests(make_loop, make_seq, solo_run)
    engine.start(rng)
    for _ in range(40):
        engine.arrive(rng, count=rng.randint(1, 4), n=rng.choice([1, 1, 3]))
        engine.run_steps(rng.randint(1, 8), commit_before_launch=rng.random() < 0.5)
        engine.books_balance()
        if rng.random() < 0.3:
            engine.end_one(rng.randint(0, 1000))
        if rng.random() < 0.1:
            engine.something_rare(rng.choice(["drain", "new parameters", "new parameters", "pool lost"]))
    engine.teardown()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_tight_pool_preempts_and_still_gives_the_ids_of_solo_runs(make_loop, make_seq, solo_run, deterministic):
    """The same with conditions under which preemption is certain, so that it is not left to chance."""
    loop = make_loop(num_pages=12, max_num_seqs=6, deterministic=deterministic, max_model_len=40)
    seqs = [make_seq(i, [1] * (i % 3) + [i] * 6, max_tokens=30, seed=i) for i in range(12)]
    loop.add(*seqs)
    loop.run()
    assert loop.scheduler.num_preemptions > 10
    assert loop.scheduler.check_idle()
    for seq in seqs:
        assert seq.token_ids == solo_run(seq)
