"""What a GPU's runner decides, without a GPU: buckets, memory, staging, draws.

Properties over sizes; no device but the processor."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagedattn.kernels import spec

from pagedattn.device.buckets import (
    MODES,
    NARROWEST,
    Buckets,
    Shape,
    Way,
    capture_sizes,
    checked_mode,
    table_widths,
)
from pagedattn.device.draws import Draw, fill_draws, sample_rows
from pagedattn.device.memory import (
    GIB,
    LOWER,
    Profile,
    check_free,
    graphs_take,
    kv_bytes,
    out_of_memory,
    wanted,
)
from pagedattn.device.runner import Limits, spread
from pagedattn.device.staging import ALIGN, fields_of, fill, layout, num_bytes
from pagedattn.errors import UserError
from pagedattn.model.batch import make_batch
from pagedattn.request import SamplingParams
from pagedattn.sampling.random import Purpose, uniform
from pagedattn.sampling.state import SampleState
from pagedattn.scheduler import Item

# ------------------------------------------------------------------------------ memory

sizes = st.integers(0, 200 << 30)
shares = st.floats(0.05, 1.0)


@given(sizes, sizes, shares)
def test_a_taken_card_is_refused_with_both_numbers(total, free, share):
    total = max(total, 1)
    free = min(free, total)
    if wanted(total, share) <= free:
        check_free(total, free, share)
        return
    with pytest.raises(UserError) as refusal:
        check_free(total, free, share)
    said = str(refusal.value)
    for number in (wanted(total, share), free, total):
        assert f"{number / GIB:.2f} GiB" in said
    assert refusal.value.param == "gpu_memory_utilization"
    lower = float(said.split("to ")[1].split(" or")[0])
    assert wanted(total, lower) <= free  # what it advises works


@given(sizes, sizes, sizes, sizes, shares, st.integers(0, 200))
def test_the_pool_and_all_else_fit_into_the_share(
    total, before, after, transient, share, graphs
):
    before = min(before, total)
    profile = Profile(total, before, min(after, before), transient)
    spent = profile.held + transient + graphs_take(graphs)
    try:
        pool = kv_bytes(profile, share, graphs)
    except UserError as refusal:
        assert spent >= wanted(total, share)
        assert "max_num_batched_tokens" in str(refusal)
        return
    assert pool > 0 and pool + spent == wanted(total, share)
    if wanted(total, share) <= before:  # as a start has checked
        assert pool + transient <= profile.after


def test_the_pool_of_a_made_up_card():
    profile = Profile(100 * GIB, 90 * GIB, 70 * GIB, 3 * GIB)
    assert kv_bytes(profile, 0.8) == 57 * GIB
    assert graphs_take(0, 2) == graphs_take(0) + (256 << 20) + (1 << 20)
    assert kv_bytes(profile, 0.8, 32) == 57 * GIB - 512 * (1 << 20)


@pytest.mark.parametrize("stage", LOWER)
def test_running_out_says_what_to_lower(stage):
    said = str(out_of_memory(stage, GIB, 80 * GIB))
    assert "1.00 GiB of 80.00 GiB" in said and LOWER[stage][1:] in said


# ----------------------------------------------------------------------------- buckets


@given(st.integers(1, 2000), st.none() | st.integers(1, 2000))
def test_capture_sizes_are_vllms_and_end_at_what_a_step_can_have(seqs, largest):
    found = capture_sizes(seqs, None, largest)
    most = min(largest or 512, seqs)
    assert list(found) == sorted(set(found)) and found[-1] == most
    assert all(n in (1, 2, 4, most) or n % 8 == 0 for n in found)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert all(gap <= 16 for gap in gaps)
    assert all(gap <= 8 for gap, n in zip(gaps, found, strict=False) if n < 248)


def test_given_sizes_are_kept_and_bad_ones_refused():
    assert capture_sizes(100, [64, 1, 8, 256]) == (1, 8, 64, 100)
    assert capture_sizes(100, [64, 1, 8, 256], 32) == (1, 8, 32)
    for bad in ([], [0, 1]):
        with pytest.raises(UserError, match="cudagraph_capture_sizes"):
            capture_sizes(8, bad)


@given(st.integers(1, 200_000), st.integers(1, 256))
def test_widths_hold_the_longest_context(length, block_size):
    widths = table_widths(length, block_size)
    assert widths[-1] == -(-length // block_size)
    assert list(widths) == sorted(set(widths))
    assert all(w * block_size >= NARROWEST for w in widths[:-1])


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=6),
    st.lists(st.integers(1, 3), min_size=1, max_size=80),
    st.integers(1, 40),
)
def test_a_bucket_is_the_smallest_that_holds_the_plan(sizes, counts, width):
    buckets = Buckets(tuple(sorted(set(sizes))), (10, 40))
    shape, recorded = buckets.choose(counts, width)
    single, n = all(c == 1 for c in counts), len(counts)
    assert shape.width == (10 if width <= 10 else 40)
    assert (recorded is Way.DECODE) == (single and n <= buckets.sizes[-1])
    if recorded is Way.DECODE:
        assert (shape, recorded) in set(buckets.shapes())
        assert shape.seqs == shape.tokens == min(s for s in buckets.sizes if s >= n)
    else:
        assert recorded is Way.EAGER
        assert (shape.tokens, shape.seqs) == (sum(counts), n)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.lists(st.integers(1, 5), min_size=1, max_size=20),
    st.booleans(),
)
def test_any_step_has_a_graph_of_as_few_tokens_as_hold_it(tokens, counts, whole):
    buckets = Buckets((), (10, 40), tuple(sorted(set(tokens))), 20 if whole else 0)
    shape, way = buckets.choose(counts, 7)
    if sum(counts) > buckets.tokens[-1]:
        assert (shape, way) == (Shape(sum(counts), len(counts), 10), Way.EAGER)
        return
    assert shape.tokens == min(t for t in buckets.tokens if t >= sum(counts))
    if whole:  # one graph, whose tables hold any context
        assert (shape, way) in set(buckets.shapes())
        assert shape.width == 40 and shape.seqs >= len(counts)
    else:  # the graphs know tokens alone
        assert way is Way.PIECES and (shape.seqs, shape.width) == (len(counts), 10)


@given(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=2, max_size=4))
def test_what_graphs_in_pieces_read_stands_in_one_place(tokens, others):
    """Whatever the number of requests, and however wide their tables."""
    places = set()
    for n in others:
        shape = Shape(tokens, n, n + 1)
        buffer = torch.zeros(num_bytes(shape, 2), dtype=torch.uint8)
        fields = fields_of(buffer, shape, 2)
        found = (fields.ids, fields.source, fields.positions, fields.slots)
        places.add(tuple(f.data_ptr() - buffer.data_ptr() for f in found))
    assert len(places) == 1


def test_without_sizes_nothing_is_recorded():
    assert Buckets((), (4,)).choose([1], 2) == (Shape(1, 1, 4), Way.EAGER)
    assert not list(Buckets((), (4,)).shapes())


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_vllms(mode):
    assert checked_mode(mode, False) == mode
    assert checked_mode(mode, True) == "NONE"
    with pytest.raises(UserError, match="FULL_AND_PIECEWISE, got 'full'"):
        checked_mode("full", False)


@given(st.integers(1, 30), st.integers(0, 200), st.integers(1, 50))
def test_the_largest_step_is_spread_over_contexts(seqs, more, longest):
    limits = Limits.of(seqs + more, seqs, longest)
    counts = spread(Shape(limits.tokens, limits.seqs, 1), longest)
    assert sum(counts) == limits.tokens and len(counts) == seqs
    assert all(1 <= n <= longest for n in counts)


# ----------------------------------------------------------------------------- staging

shapes = st.builds(
    lambda s, more, w: Shape(s + more, s, w),
    st.integers(1, 9),
    st.integers(0, 20),
    st.integers(1, 12),
)


@given(shapes, st.integers(1, 3))
def test_fields_stand_aligned_and_apart(shape, groups):
    buffer = torch.zeros(num_bytes(shape, groups), dtype=torch.uint8)
    fields = fields_of(buffer, shape, groups)
    spans = []
    for name, dtype, size in layout(shape, groups):
        field = getattr(fields, name)
        assert field.dtype == dtype and tuple(field.shape) == size
        start = field.data_ptr() - buffer.data_ptr()
        assert start % ALIGN == 0
        spans.append((start, start + field.nbytes))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= len(buffer)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(0, 4),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_padding_computes_nothing_of_use(counts, padding, groups, draw):
    counts.sort(key=lambda n: n > 1)
    if max(counts) > 1:
        padding = 0  # only single tokens are padded
    items = []
    for i, n in enumerate(counts):
        start = draw.randrange(6)
        blocks = -(-(start + n) // 4)
        tables = tuple(
            [draw.randrange(1, 50) for _ in range(blocks)] for _ in range(groups)
        )
        items.append(Item(f"r{i}", i, start, tuple(range(n)), tables, True))
    batch = make_batch(items, [item.tokens for item in items], 4)
    t, s = len(batch.ids), len(counts)
    shape = Shape(t + padding, s + padding, 6)
    buffer = torch.full((num_bytes(shape, groups),), 99, dtype=torch.uint8)
    fields = fields_of(buffer, shape, groups)
    fill(fields, batch, torch.arange(t))
    padded = fields.batch(batch.num_decodes + padding)
    for name in ("ids", "positions", "lengths"):
        assert getattr(padded, name)[: len(getattr(batch, name))].equal(
            getattr(batch, name)
        )
    assert padded.slots[:, :t].equal(batch.slots)
    assert padded.query_starts[: s + 1].equal(batch.query_starts)
    for g, (row, item) in enumerate(itertools.product(range(s), range(groups))):
        table = items[row].tables[item]
        assert padded.tables[item, row, : len(table)].tolist() == list(table), g
    assert padded.rows[:s].equal(batch.query_starts[1:].long() - 1)
    # What was added: one token each, in the null block.
    assert padded.ids[t:].eq(0).all() and padded.positions[t:].eq(0).all()
    assert padded.slots[:, t:].eq(0).all() and padded.tables[:, s:].eq(0).all()
    assert padded.lengths[s:].eq(1).all() and fields.source[t:].eq(-1).all()
    assert padded.query_starts.diff()[s:].eq(1).all()
    assert padded.rows[s:].tolist() == list(range(t, t + padding))


# ------------------------------------------------------------------------------- draws


def test_rows_ask_what_their_requests_ask():
    shape = Shape(4, 4, 1)
    fields = fields_of(
        torch.full((num_bytes(shape, 1),), 99, dtype=torch.uint8), shape, 1
    )
    wishes = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    state = SampleState(wishes, -3, 100, [1, 2], sibling=4)
    greedy = SampleState(SamplingParams(temperature=0.0), 1, 100, [1])
    fill_draws(fields, [None, Draw(state, 17), Draw(greedy, 2)])
    assert fields.temperature.tolist() == [0, 0.5, 0, 0]
    assert fields.top_k.tolist() == [0, 7, 0, 0]
    assert fields.top_p.tolist() == [1, 0.25, 1, 1]
    assert fields.min_p.tolist() == [0, 0.125, 0, 0]
    assert fields.uniform.tolist() == [0, uniform(-3, 4, 17, Purpose.TOKEN), 0, 0]


rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        st.sampled_from([0, 1, 3, 50]),
        st.sampled_from([0.1, 0.9, 1.0]),
        st.sampled_from([0.0, 0.2]),
        st.floats(0, 0.999),
    ),
    min_size=1,
    max_size=5,
)


@given(rows, st.integers(0, 2**20))
def test_the_processor_samples_as_the_specification(asked, seed):
    draw = np.random.default_rng(seed)
    logits = torch.from_numpy(draw.normal(size=(len(asked), 40)).astype(np.float32))
    temperature, top_k, top_p, min_p, u = (
        torch.tensor(x) for x in zip(*asked, strict=True)
    )
    args = (
        logits,
        temperature.float(),
        top_k.int(),
        top_p.double(),
        min_p.float(),
        u.double(),
    )
    expected, found = (torch.full((len(asked),), -9) for _ in range(2))
    spec.sample(expected, *args)
    sample_rows(found, *args)
    assert found.equal(expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_numbers_fail_alone(temperature):
    logits = torch.zeros(5, 6)
    logits[0, 3], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 2], logits[4, 4] = 50.0, 50.0
    logits[4, 0] = -torch.inf
    out = torch.zeros(5, dtype=torch.int64)
    ones = torch.ones(5)
    args = ones * temperature, torch.zeros(5).int(), ones.double(), ones * 0
    for sample in (spec.sample, sample_rows):
        sample(out.fill_(7), logits, *args, ones.double() / 2)
        assert out.tolist() == [-1, -1, -1, 2, 4]
