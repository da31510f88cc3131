"""Tiles over ragged groups: which group a program serves, found on the device.

Group g owns rows starts[g] to starts[g + 1], and some groups may be empty. Counting
each group's tiles would need its size on the host, which waits for the device. Instead
group g is given the tiles from starts[g] // SIZE + g on: never too few, one too many at
most, and the programs of those have nothing to do.
"""

import triton
import triton.language as tl


def tiles(rows: int, groups: int, size: int) -> int:
    """How many tiles of `size` rows all groups are given together."""
    return rows // size + groups


@triton.jit
def owner(tile, starts, groups, SIZE: tl.constexpr):
    """The group of this tile: the last g with starts[g] // SIZE + g <= tile."""
    low, high = 0, groups
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // SIZE + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def rows_of(tile, starts, groups, SIZE: tl.constexpr):
    """(g, first, end): a tile's group, its first row, the end of the group's rows."""
    g = owner(tile, starts, groups, SIZE)
    start, end = tl.load(starts + g), tl.load(starts + g + 1)
    return g, start + (tile - start // SIZE - g) * SIZE, end
