"""The few things that numba's kernels say to LLVM directly: tiles held in registers.

A numba loop nest spills its sums to memory at every step; these intrinsics write the
loop with vector registers named one by one. They know flat float32 memory, offsets and
strides, all counted in numbers, and nothing of attention. Chapter 04 draws them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Reassociation and fused multiply-add, but not the promise that no infinity or NaN
# occurs: a running maximum starts at minus infinity.
MATH = {"contract", "reassoc", "nsz", "arcp"}
LANES = 8  # floats in a vector that LLVM is given; it splits or joins them as it must
COLUMNS = 16  # a product tile is up to 6 x 16: 12 of AVX2's 16 registers are sums
ROWS = 6
TOKENS = 4  # a dot tile is up to 3 x 4: 12 sums again
HEADS = 3

WORD = ir.IntType(32)
VECTOR = ir.VectorType(ir.FloatType(), LANES)
INDEX = types.int64
Array = np.ndarray

# A part of a kernel: no wrappers for Python and C, which halve the compiler's speed.
inline = njit(
    nogil=True,
    error_model="numpy",
    fastmath=MATH,
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
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
        byte, word = ir.IntType(8).as_pointer(), WORD
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(
            builder.module, kind, "llvm.prefetch.p0i8"
        )
        line = builder.bitcast(builder.gep(data, [args[1]]), byte)
        builder.call(function, [line, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, INDEX), codegen


def _product_tile(rows: int) -> Callable[..., None]:
    """c[i, j] (+)= sum over k of a[i, k] * b[k, j] for `rows` x COLUMNS places."""

    def emit(builder: Any, args: Any) -> None:
        a, a0, lda, b, b0, ldb, c, c0, ldc, depth, keep = args
        places = [
            _vector_at(builder, c, c0, ldc, i, j)
            for i in range(rows)
            for j in range(0, COLUMNS, LANES)
        ]
        sums = [_sum_from(builder, place, keep) for place in places]
        with cgutils.for_range(builder, depth) as loop:
            start = builder.add(b0, builder.mul(ldb, loop.index))
            bs = [
                builder.load(_vector_at(builder, b, start, ldb, 0, j), align=4)
                for j in range(0, COLUMNS, LANES)
            ]
            for i in range(rows):
                at = builder.add(
                    a0, builder.add(builder.mul(lda, lda.type(i)), loop.index)
                )
                value = _spread(builder, builder.load(builder.gep(a, [at])))
                for j, column in enumerate(bs):
                    _multiply_add(builder, value, column, sums[i * len(bs) + j])
        for place, total in zip(places, sums, strict=True):
            builder.store(builder.load(total), place, align=4)

    codegen = _function(f"product_tile_{rows}", emit)

    @intrinsic
    def tile(
        typingctx: Any,
        a: Any,
        a0: Any,
        lda: Any,
        b: Any,
        b0: Any,
        ldb: Any,
        c: Any,
        c0: Any,
        ldc: Any,
        depth: Any,
        keep: Any,
    ) -> Any:
        n = INDEX
        return types.void(a, n, n, b, n, n, c, n, n, n, n), codegen

    return tile


def _dot_tile(rows: int) -> Callable[..., None]:
    """c[i, t] = a[i] . b[t] for `rows` rows of a, TOKENS rows of b, depth % 8 = 0."""

    def emit(builder: Any, args: Any) -> None:
        a, a0, lda, b, b0, ldb, c, c0, ldc, depth = args
        zero = VECTOR([0.0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * TOKENS)]
        with cgutils.for_range_slice(
            builder, depth.type(0), depth, depth.type(LANES), depth.type
        ) as (k, _):
            a_at, b_at = builder.add(a0, k), builder.add(b0, k)
            bs = [
                builder.load(_vector_at(builder, b, b_at, ldb, t, 0), align=4)
                for t in range(TOKENS)
            ]
            for i in range(rows):
                value = builder.load(_vector_at(builder, a, a_at, lda, i, 0), align=4)
                for t, token in enumerate(bs):
                    _multiply_add(builder, value, token, sums[i * TOKENS + t])
        for i in range(rows):
            for t in range(TOKENS):
                at = builder.add(
                    c0, builder.add(builder.mul(ldc, ldc.type(i)), ldc.type(t))
                )
                total = _across(builder, builder.load(sums[i * TOKENS + t]))
                builder.store(total, builder.gep(c, [at]))

    codegen = _function(f"dot_tile_{rows}", emit)

    @intrinsic
    def tile(
        typingctx: Any,
        a: Any,
        a0: Any,
        lda: Any,
        b: Any,
        b0: Any,
        ldb: Any,
        c: Any,
        c0: Any,
        ldc: Any,
        depth: Any,
    ) -> Any:
        n = INDEX
        return types.void(a, n, n, b, n, n, c, n, n, n), codegen

    return tile


def _function(name: str, emit: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """Code that calls `emit`'s code as a function of its own, one in the whole module.

    Never inlined: LLVM optimises a parallel kernel three times over, tiles included.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = iter(_data(context, builder, signature, args, (0, 3, 6)))
        args = [next(data) if i in (0, 3, 6) else arg for i, arg in enumerate(args)]
        kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        if function.is_declaration:
            function.attributes.add("noinline")
            function.linkage = "linkonce_odr"
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            emit(inner, function.args)
            inner.ret_void()
        builder.call(function, args)
        return context.get_dummy_value()

    return codegen


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


def _across(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes."""
    kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), VECTOR])
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    reduce = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(reduce, [ir.FloatType()(0.0), vector], fastmath=("reassoc",))


_product_1, _product_2, _product_3 = (_product_tile(n) for n in (1, 2, 3))
_product_4, _product_5, _product_6 = (_product_tile(n) for n in (4, 5, 6))
_dot_1, _dot_2, _dot_3 = (_dot_tile(n) for n in (1, 2, 3))


@inline
def product_tile(
    rows: int, depth: int, a: tuple, b: tuple, c: tuple, keep: int
) -> None:
    """c (+)= a @ b for rows <= ROWS and COLUMNS columns; keep = 0 overwrites c.

    a, b and c are (array, place of the first number, numbers from row to row).
    """
    (a, a0, lda), (b, b0, ldb), (c, c0, ldc) = a, b, c
    if rows == 6:
        _product_6(a, a0, lda, b, b0, ldb, c, c0, ldc, depth, keep)
    elif rows == 5:
        _product_5(a, a0, lda, b, b0, ldb, c, c0, ldc, depth, keep)
    elif rows == 4:
        _product_4(a, a0, lda, b, b0, ldb, c, c0, ldc, depth, keep)
    elif rows == 3:
        _product_3(a, a0, lda, b, b0, ldb, c, c0, ldc, depth, keep)
    elif rows == 2:
        _product_2(a, a0, lda, b, b0, ldb, c, c0, ldc, depth, keep)
    else:
        _product_1(a, a0, lda, b, b0, ldb, c, c0, ldc, depth, keep)


@inline
def dot_tile(rows: int, depth: int, a: tuple, b: tuple, c: tuple) -> None:
    """c = a @ b.T for rows <= HEADS rows of a, TOKENS rows of b; depth % LANES == 0."""
    (a, a0, lda), (b, b0, ldb), (c, c0, ldc) = a, b, c
    if rows == 3:
        _dot_3(a, a0, lda, b, b0, ldb, c, c0, ldc, depth)
    elif rows == 2:
        _dot_2(a, a0, lda, b, b0, ldb, c, c0, ldc, depth)
    else:
        _dot_1(a, a0, lda, b, b0, ldb, c, c0, ldc, depth)
