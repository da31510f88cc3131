"""What turns queries and keys and fills the cache, in Triton: one program a token.

The functions of spec.py: same names, arguments and KV layout. It knows tensors on one
device, and nothing of models or requests.
"""

import triton
import triton.language as tl
from torch import Tensor

from .launch import Config, launch

HEADS = 8  # heads that a program takes at a time
NUMBERS = 4096  # of a block that is copied, those of one program


def layout(k_cache: Tensor) -> tuple[int, int, int]:
    """(kv_heads, block_size, head_dim) of a cache."""
    return tuple(k_cache.shape[1:])


@triton.jit
def slot_row(slot, LAYOUT: tl.constexpr):
    """Where the first KV head of a slot stands in the cache's memory."""
    block, offset = slot // LAYOUT[1], slot % LAYOUT[1]
    return (block * LAYOUT[0] * LAYOUT[1] + offset) * LAYOUT[2]


@triton.jit
def write_heads(source, stride, target, first, LAYOUT, HEADS: tl.constexpr):
    """Copy every KV head's numbers from `first` on, from a token's row to its slot."""
    WIDE: tl.constexpr = triton.next_power_of_2(LAYOUT[2])
    d = tl.arange(0, WIDE)[None, :]
    for start in range(0, LAYOUT[0], HEADS):
        h = start + tl.arange(0, HEADS)[:, None]
        inside = (h < LAYOUT[0]) & (d >= first) & (d < LAYOUT[2])
        row = tl.load(source + h * stride + d, mask=inside)
        place = target + h * (LAYOUT[1] * LAYOUT[2]) + d
        tl.store(place, row, mask=inside)


@triton.jit(do_not_specialize=["slots"])
def write_token(
    key,  # [tokens, kv_heads, head_dim]
    value,  # [tokens, kv_heads, head_dim]
    k_cache,  # [blocks, kv_heads, block_size, head_dim]
    v_cache,  # [blocks, kv_heads, block_size, head_dim]
    slots,  # [tokens]
    strides,  # of key by token and by head, of value likewise
    LAYOUT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One token's keys and values, all heads."""
    t = tl.program_id(0).to(tl.int64)
    at = slot_row(tl.load(slots + t), LAYOUT)
    k, v = key + t * strides[0], value + t * strides[2]
    write_heads(k, strides[1], k_cache + at, 0, LAYOUT, HEADS)
    write_heads(v, strides[3], v_cache + at, 0, LAYOUT, HEADS)


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """As spec.write_kv."""
    launch(
        write_token,
        (len(key),),
        Config(),
        key,
        value,
        k_cache,
        v_cache,
        slots,
        (*key.stride()[:2], *value.stride()[:2]),
        layout(k_cache),
        HEADS,
    )


# ----------------------------------------------------------------------------- rotary


@triton.jit
def angles(positions, cos_sin, t, HALF: tl.constexpr):
    """The cosines and sines of token t: each [1, half], padded to a power of two."""
    d = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    row = cos_sin + tl.load(positions + t) * (2 * HALF) + d
    cos = tl.load(row, mask=d < HALF, other=0.0).to(tl.float32)
    return cos, tl.load(row + HALF, mask=d < HALF, other=0.0).to(tl.float32)


@triton.jit
def turned(x, stride, turn, start, heads, HALF: tl.constexpr, HEADS: tl.constexpr):
    """(places, inside, firsts, seconds): turned pairs (d, d + half) of HEADS heads."""
    cos, sin = turn
    h = start + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    places, inside = x + h * stride + d, (h < heads) & (d < HALF)
    a = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    return places, inside, a * cos - b * sin, b * cos + a * sin


@triton.jit
def turn_heads(x, stride, turn, heads, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Turn all heads of one token in place."""
    for start in range(0, heads, HEADS):
        at, inside, first, second = turned(x, stride, turn, start, heads, HALF, HEADS)
        tl.store(at, first, mask=inside)
        tl.store(at + HALF, second, mask=inside)


@triton.jit(do_not_specialize=["positions"])
def rotate_token(
    q,  # [tokens, heads, head_dim]
    k,  # [tokens, kv_heads, head_dim]
    positions,  # [tokens]
    cos_sin,  # [max_len, 2 half]
    strides,  # of q by token and by head, of k likewise
    heads,
    kv_heads,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One token's queries and keys."""
    t = tl.program_id(0).to(tl.int64)
    turn = angles(positions, cos_sin, t, HALF)
    turn_heads(q + t * strides[0], strides[1], turn, heads, HALF, HEADS)
    turn_heads(k + t * strides[2], strides[3], turn, kv_heads, HALF, HEADS)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """As spec.rotary."""
    launch(
        rotate_token,
        (len(q),),
        Config(),
        q,
        k,
        positions,
        cos_sin,
        (*q.stride()[:2], *k.stride()[:2]),
        q.shape[1],
        k.shape[1],
        cos_sin.shape[1] // 2,
        HEADS,
    )


@triton.jit(do_not_specialize=["positions", "slots"])
def rotate_and_write_token(
    q,  # [tokens, heads, head_dim]
    k,  # [tokens, kv_heads, head_dim]
    v,  # [tokens, kv_heads, head_dim]
    positions,  # [tokens]
    cos_sin,  # [max_len, 2 half]
    k_cache,  # [blocks, kv_heads, block_size, head_dim]
    v_cache,  # [blocks, kv_heads, block_size, head_dim]
    slots,  # [tokens]
    strides,  # of q by token and by head, of k and of v likewise
    heads,
    HALF: tl.constexpr,
    LAYOUT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One token: turned keys go to their place and, from registers, to the cache."""
    t = tl.program_id(0).to(tl.int64)
    turn = angles(positions, cos_sin, t, HALF)
    turn_heads(q + t * strides[0], strides[1], turn, heads, HALF, HEADS)
    at = slot_row(tl.load(slots + t), LAYOUT)
    x, stride = k + t * strides[2], strides[3]
    for start in range(0, LAYOUT[0], HEADS):
        places, inside, first, second = turned(
            x, stride, turn, start, LAYOUT[0], HALF, HEADS
        )
        tl.store(places, first, mask=inside)
        tl.store(places + HALF, second, mask=inside)
        h = start + tl.arange(0, HEADS)[:, None]
        d = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        target = k_cache + at + h * (LAYOUT[1] * LAYOUT[2]) + d
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    if 2 * HALF < LAYOUT[2]:  # the rest of a head stays as it is
        write_heads(x, stride, k_cache + at, 2 * HALF, LAYOUT, HEADS)
    write_heads(v + t * strides[4], strides[5], v_cache + at, 0, LAYOUT, HEADS)


def rotary_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> None:
    """As spec.rotary_write, token by token, while its keys are at hand."""
    launch(
        rotate_and_write_token,
        (len(q),),
        Config(),
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slots,
        (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        q.shape[1],
        cos_sin.shape[1] // 2,
        layout(k_cache),
        HEADS,
    )


# --------------------------------------------------------------------- copying blocks


@triton.jit(do_not_specialize=["sources", "targets"])
def copy_block(
    k_cache,  # [blocks, kv_heads, block_size, head_dim]
    v_cache,  # [blocks, kv_heads, block_size, head_dim]
    sources,  # [copies]
    targets,  # [copies]
    SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Program (part, copy): some of one block's numbers, keys and values."""
    copy, i = tl.program_id(1), tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    source = tl.load(sources + copy) * SIZE + i
    target = tl.load(targets + copy) * SIZE + i
    tl.store(k_cache + target, tl.load(k_cache + source, mask=i < SIZE), mask=i < SIZE)
    tl.store(v_cache + target, tl.load(v_cache + source, mask=i < SIZE), mask=i < SIZE)


def copy_blocks(
    k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor
) -> None:
    """As spec.copy_blocks."""
    size = k_cache[0].numel()
    grid = triton.cdiv(size, NUMBERS), len(sources)
    args = k_cache, v_cache, sources, targets
    launch(copy_block, grid, Config(), *args, size, NUMBERS)
