"""The few things that numba's kernels say to LLVM directly: tiles held in registers.

A numba loop nest spills its sums to memory at every step; these intrinsics write the
loop with vector registers named one by one. They know flat float32 memory, offsets and
strides, all counted in numbers, and nothing of attention. Chapter 06 shows them.
"""

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Reassociation and fused multiply-add, but not the promise that no infinity or NaN
# occurs: a running maximum starts at minus infinity.
MATH = {"contract", "reassoc", "nsz", "arcp"}
FEATURES = numba.config.CPU_FEATURES or get_host_cpu_features().flatten()
WIDEST = "+avx512f" in FEATURES.split(",")
LANES = 16 if WIDEST else 8  # floats of a vector; LLVM splits what no register holds
COLUMNS = 2 * LANES  # a product tile is up to ROWS x COLUMNS:
ROWS = 13 if WIDEST else 6  # 26 of 32 registers, or 12 of 16, are sums
LINE = 16  # floats in a cache line of 64 bytes
L1, L2 = 3, 2  # caches, as LLVM's prefetch numbers them
TOKENS = 4  # a dot tile is up to 3 x 4: 12 sums again
HEADS = 3

WORD, INT64 = ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(ir.FloatType(), LANES)
INDEX = types.int64
Array = np.ndarray
Emit = Callable[[Any, Any], None]  # (builder, arguments): writes a function's body

# A part of a kernel: no wrappers for Python and C, which halve the compiler's speed.
# Inlined, because a call passes every array as seven numbers and counts references to
# it: calls were a third of decode attention.
inline = njit(
    nogil=True,
    error_model="numpy",
    fastmath=MATH,
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    forceinline=True,
)


@intrinsic
def take_ticket(typingctx: Any, counters: Any, which: Any) -> Any:
    """Return counters[which] (int64) and add one to it, as one atomic step."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (data,) = _data(context, builder, signature, args, (0,))
        place = builder.gep(data, [args[1]])
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "acq_rel")

    return types.int64(counters, INDEX), codegen


@intrinsic
def power_of_two(typingctx: Any, n: Any) -> Any:
    """2.0 ** n for an int32 n from -126 to 127: n + 127 is a float's exponent field."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.add(args[0], WORD(127))
        return builder.bitcast(builder.shl(exponent, WORD(23)), ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def stretch(typingctx: Any, array: Any, start: Any, length: Any) -> Any:
    """`length` numbers of the array's memory from its place `start` on, as a vector.

    Neither is checked against the array: a strided view's rows lie past its own size.
    Loops over a stretch vectorise, because its indices need no test for being negative.
    """
    result = types.Array(array.dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = cgutils.create_struct_proxy(array)(context, builder, args[0])
        target = cgutils.create_struct_proxy(result)(context, builder)
        target.data = builder.gep(source.data, [args[1]])
        target.nitems, target.itemsize = args[2], source.itemsize
        target.shape = cgutils.pack_array(builder, [args[2]])
        target.strides = cgutils.pack_array(builder, [source.itemsize])
        return target._getvalue()

    return result(array, INDEX, INDEX), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, place: Any) -> Any:
    """Ask for the cache line of array's memory at `place`; it need not exist."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (data,) = _data(context, builder, signature, args, (0,))
        _prefetch(builder, builder.gep(data, [args[1]]), L1)
        return context.get_dummy_value()

    return types.void(array, INDEX), codegen


@intrinsic
def largest_of(typingctx: Any, array: Any, n: Any) -> Any:
    """The maximum of an array's first n numbers, n > 0 and a multiple of LANES.

    LLVM makes no vectors of such a loop by itself: a NaN would tell the difference.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (data,) = _data(context, builder, signature, args, (0,))
        top = cgutils.alloca_once_value(builder, VECTOR([float("-inf")] * LANES))
        with cgutils.for_range_slice(builder, INT64(0), args[1], INT64(LANES)) as (
            k,
            _,
        ):
            x = builder.load(_vector_at(builder, data, k, INT64(0), 0, 0), align=4)
            most = builder.load(top)
            greater = builder.fcmp_ordered(">", x, most)
            builder.store(builder.select(greater, x, most), top)
        kind = ir.FunctionType(ir.FloatType(), [VECTOR])
        name = f"llvm.vector.reduce.fmax.v{LANES}f32"
        across = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(across, [builder.load(top)])

    return types.float32(array, INDEX), codegen


def _prefetch(builder: Any, place: Any, cache: int) -> None:
    byte, word = ir.IntType(8).as_pointer(), WORD
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = cgutils.get_or_insert_function(
        builder.module, kind, "llvm.prefetch.p0i8"
    )
    line = builder.bitcast(place, byte)
    builder.call(function, [line, word(0), word(cache), word(1)])


def _product_tile(rows: int, columns: int) -> Emit:
    """c[i, j] (+)= sum over k of a[i, k] * b[k, j] for `rows` x `columns` places."""

    def emit(builder: Any, args: Any) -> None:
        *operands, keep = args
        _emit_product(builder, operands, rows, columns, keep)

    return emit


def _stream_tile(rows: int) -> Emit:
    """A product tile that keeps nothing, and meanwhile fetches what comes after it:
    with each k as much as a row of b, from b's memory at `ahead` + k * `step` on."""

    def emit(builder: Any, args: Any) -> None:
        *operands, ahead, step = args

        def ask(k: Any) -> None:
            place = builder.add(ahead, builder.mul(step, k))
            for first in range(0, COLUMNS, LINE):
                line = builder.add(place, place.type(first))
                _prefetch(builder, builder.gep(operands[3], [line]), L2)

        _emit_product(builder, operands, rows, COLUMNS, INT64(0), ask)

    return emit


def _emit_product(
    builder: Any,
    operands: Any,
    rows: int,
    columns: int,
    keep: Any,
    ask: Callable[[Any], None] = lambda k: None,
) -> None:
    """The sums of a tile, from zero or from what is kept; `ask(k)` joins each turn."""
    a, a0, lda, b, b0, ldb, c, c0, ldc, depth = operands
    places = [
        _vector_at(builder, c, c0, ldc, i, j)
        for i in range(rows)
        for j in range(0, columns, LANES)
    ]
    sums = [_sum_from(builder, place, keep) for place in places]
    with cgutils.for_range(builder, depth) as loop:
        start = builder.add(b0, builder.mul(ldb, loop.index))
        ask(loop.index)

        @functools.cache
        def value(i: int) -> Any:
            row = builder.add(a0, builder.mul(lda, lda.type(i)))
            place = builder.gep(a, [builder.add(row, loop.index)])
            return _spread(builder, builder.load(place))

        @functools.cache
        def column(j: int) -> Any:
            place = _vector_at(builder, b, start, ldb, 0, j * LANES)
            return builder.load(place, align=4)

        for i, j in _shorter_side_held(rows, columns // LANES):
            total = sums[i * columns // LANES + j]
            _multiply_add(builder, value(i), column(j), total)
    for place, total in zip(places, sums, strict=True):
        builder.store(builder.load(total), place, align=4)


def _shorter_side_held(rows: int, columns: int) -> list[tuple[int, int]]:
    """All places of a tile, in the order that takes the fewest registers.

    12 sums, three held vectors and one of the other side fill AVX2's 16 registers; a
    17th would live in memory.
    """
    if rows > columns:
        return [(i, j) for i in range(rows) for j in range(columns)]
    return [(i, j) for j in range(columns) for i in range(rows)]


def _dot_tile(rows: int) -> Emit:
    """c[i, t] = a[i] . b[t] for `rows` rows of a, TOKENS rows of b.

    And that `tiles` times, each time TOKENS rows of b and columns of c further on.
    """

    def emit(builder: Any, args: Any) -> None:
        a, a0, lda, b, b0, ldb, c, c0, ldc, depth, tiles = args
        zero = VECTOR([0.0] * LANES)
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(rows * TOKENS)]
        with cgutils.for_range(builder, tiles) as tile:
            first = builder.mul(tile.index, tiles.type(TOKENS))
            row = builder.add(b0, builder.mul(first, ldb))
            for total in sums:
                builder.store(zero, total)
            with cgutils.for_range_slice(
                builder, depth.type(0), depth, depth.type(LANES), depth.type
            ) as (k, _):
                a_at, b_at = builder.add(a0, k), builder.add(row, k)
                values = [
                    builder.load(_vector_at(builder, a, a_at, lda, i, 0), align=4)
                    for i in range(rows)
                ]
                for t in range(TOKENS):  # one by one: see _shorter_side_held
                    place = _vector_at(builder, b, b_at, ldb, t, 0)
                    token = builder.load(place, align=4)
                    for i, value in enumerate(values):
                        _multiply_add(builder, value, token, sums[i * TOKENS + t])
            for i in range(rows):
                totals = [builder.load(sums[i * TOKENS + t]) for t in range(TOKENS)]
                at = builder.add(builder.add(c0, first), builder.mul(ldc, ldc.type(i)))
                total = _across(builder, *totals)
                place = builder.bitcast(builder.gep(c, [at]), total.type.as_pointer())
                builder.store(total, place, align=4)

    return emit


def _family(name: str, emits: dict[int, Emit]) -> Callable[..., None]:
    """An intrinsic (size, a, b, c, numbers) that runs the tile of that size.

    a, b and c are (array, place of the first number, numbers from row to row). A tile's
    function gets data pointers for the arrays, and everything as one row of arguments.
    """

    @intrinsic
    def tile(typingctx, size, a, b, c, numbers):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            flat = [
                _plain(context, builder, kind, value)
                for kinds, values in zip(signature.args[1:], args[1:], strict=True)
                for kind, value in zip(
                    kinds, cgutils.unpack_tuple(builder, values), strict=True
                )
            ]
            _switch(builder, name, args[0], emits, flat)
            return context.get_dummy_value()

        return types.void(INDEX, a, b, c, numbers), codegen

    return tile


def _plain(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """An array's data pointer; any other value as an int64."""
    if isinstance(kind, types.Array):
        return cgutils.create_struct_proxy(kind)(context, builder, value).data
    return context.cast(builder, value, kind, INDEX)


def _switch(
    builder: Any, name: str, size: Any, emits: dict[int, Emit], args: Any
) -> None:
    """Call the function of a size which is known only when the kernel runs."""
    last = max(emits)
    blocks = {n: builder.append_basic_block(f"{name}_{n}") for n in emits}
    after = builder.append_basic_block(f"{name}_done")
    choice = builder.switch(size, blocks[last])
    for n, block in blocks.items():
        if n != last:
            choice.add_case(size.type(n), block)
        with builder.goto_block(block):
            builder.call(_function(builder.module, f"{name}_{n}", emits[n], args), args)
            builder.branch(after)
    builder.position_at_end(after)


def _function(module: Any, name: str, emit: Emit, args: Any) -> Any:
    """A function whose body `emit` writes, one in the whole module.

    Never inlined: LLVM optimises a parallel kernel three times over, tiles included.
    Optimised for size: else LLVM unrolls the loop, and the copies' loads, moved to the
    top together, push sums out of their registers.
    """
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    function = cgutils.get_or_insert_function(module, kind, name)
    if function.is_declaration:
        function.attributes.add("noinline")
        function.attributes.add("optsize")
        function.linkage = "linkonce_odr"
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        emit(inner, function.args)
        inner.ret_void()
    return function


def _data(context: Any, builder: Any, signature: Any, args: Any, which: Any) -> Any:
    """The data pointers of the array arguments at the given places."""
    return [
        cgutils.create_struct_proxy(signature.args[i])(context, builder, args[i]).data
        for i in which
    ]


def _vector_at(
    builder: Any, data: Any, start: Any, stride: Any, row: int, column: int
) -> Any:
    offset = builder.add(builder.mul(stride, stride.type(row)), stride.type(column))
    pointer = builder.gep(data, [builder.add(start, offset)])
    return builder.bitcast(pointer, VECTOR.as_pointer())


def _sum_from(builder: Any, place: Any, keep: Any) -> Any:
    """A register that starts as what stands at `place`, or as zero where keep is 0."""
    kept = builder.icmp_signed("!=", keep, keep.type(0))
    zero = VECTOR([0.0] * LANES)
    start = builder.select(kept, builder.load(place, align=4), zero)
    return cgutils.alloca_once_value(builder, start)


def _multiply_add(builder: Any, a: Any, b: Any, total: Any) -> None:
    product = builder.fmul(a, b, flags=("contract",))
    builder.store(
        builder.fadd(builder.load(total), product, flags=("contract",)), total
    )


def _spread(builder: Any, value: Any) -> Any:
    """A vector with `value` in every lane."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, value, WORD(0))
    return builder.shuffle_vector(
        first, nothing, ir.VectorType(WORD, LANES)([0] * LANES)
    )


def _across(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of four vectors' lanes, as a vector of four numbers.

    Two vectors are folded into one of half sums, and so on: 11 instructions for four
    sums of 8 lanes, where one sum by itself takes six.
    """
    if LANES == 16:
        a, b, c, d = (_halved(builder, x) for x in (a, b, c, d))
    ab = _fold(builder, a, b, [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
    cd = _fold(builder, c, d, [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
    abcd = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    halves = _fold(builder, ab, cd, *abcd)
    return _fold(builder, halves, halves, [0, 1, 2, 3], [4, 5, 6, 7])


def _halved(builder: Any, x: Any) -> Any:
    """The lower half of a vector plus the upper half."""
    half = LANES // 2
    return _fold(builder, x, x, list(range(half)), list(range(half, LANES)))


def _fold(builder: Any, a: Any, b: Any, first: list[int], second: list[int]) -> Any:
    """Some lanes of a and b (b's count from a's end on) plus as many others."""
    kind = ir.VectorType(WORD, len(first))
    parts = [builder.shuffle_vector(a, b, kind(lanes)) for lanes in (first, second)]
    return builder.fadd(*parts)


def _sizes(tile: Callable[..., Emit], rows: int, *columns: int) -> dict[int, Emit]:
    return {n: tile(n, *columns) for n in range(1, rows + 1)}


# c (+)= a @ b for `size` rows, up to ROWS, and COLUMNS columns, or half as many rows
# and twice as many columns, or one vector; numbers: (depth, keep), keep = 0 overwrites.
product_tile = _family("product", _sizes(_product_tile, ROWS, COLUMNS))
wide_tile = _family("wide", _sizes(_product_tile, ROWS // 2, 2 * COLUMNS))
narrow_tile = _family("narrow", _sizes(_product_tile, ROWS, LANES))
# As product_tile with keep = 0, while COLUMNS numbers of b's memory are fetched from
# ahead + k * step on, for k < depth; numbers: (depth, ahead, step).
stream_tile = _family("stream", _sizes(_stream_tile, ROWS))
# c = a @ b.T for `size` rows of a, up to HEADS, and TOKENS rows of b, and that `tiles`
# times further on; numbers: (depth, tiles), depth % LANES == 0.
dot_tiles = _family("dot", _sizes(_dot_tile, HEADS))
