"""A parallel loop for numba's kernels, run by the threads that torch computes with.

numba's own parallel loops bring a second thread pool: each pool's idle threads spin on
the cores that the other's want (numba asks for a libgomp of another name than torch's
wheel carries, so that even its OpenMP layer is a second copy), and they take two to
three times as long to compile. This module knows OpenMP's pool and nothing of kernels.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BYTES = ir.IntType(8).as_pointer()
INT32, INT64 = ir.IntType(32), ir.IntType(64)
FORK = "pagedattn_fork"
FORK_TYPE = ir.FunctionType(ir.VoidType(), [BYTES, BYTES, INT32, INT32])
# GOMP_parallel(function, data, threads, flags): what a compiler makes of omp parallel.
FORK_CALL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
)
WORK_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def get_num_threads() -> int:
    """Threads that a loop uses: torch's setting, so that there is only one."""
    return torch.get_num_threads()


def set_num_threads(n: int) -> None:
    """Use n threads for torch and for these kernels.

    The count belongs to the calling thread; a thread that computes for the first time
    later starts with the count that was set last.
    """
    torch.set_num_threads(n)


def openmp_path() -> str | None:
    """The OpenMP library that torch has loaded; None where there is none in sight."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split()[-1] for line in lines if "omp" in line.split("/")[-1]}
    known = [
        p for p in paths if Path(p).name.startswith(("libgomp", "libiomp", "libomp"))
    ]
    return min(known, key=lambda p: ("torch" not in p, p), default=None)


@FORK_CALL
def serial_fork(function: int, data: int, threads: int, flags: int) -> None:
    """Stands in for OpenMP where there is none: one thread does all the work."""
    WORK_CALL(function)(data)


def load_fork() -> None:
    """Tell LLVM where to find the function by which a loop starts its threads."""
    path = openmp_path()
    fork = getattr(ctypes.CDLL(path), "GOMP_parallel", None) if path else None
    address = ctypes.cast(fork or serial_fork, ctypes.c_void_p).value
    binding.add_symbol(FORK, address)


@intrinsic
def for_each(
    typingctx: Any, count: Any, batch: Any, threads: Any, body: Any, args: Any
) -> Any:
    """Run body(i, *args) for every i < count, on so many threads.

    They take `batch` numbers at a time from one counter: a core that is busy elsewhere
    delays one batch, not half of the work. Calls run in any order.
    """
    resolved = body.get_call_type(typingctx, (types.int64, *args.types), {})
    compiled = body.dispatcher.get_compile_result(resolved)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        count, batch, threads, _, members = values
        context.active_code_library.add_linking_library(compiled.library)
        counter = cgutils.alloca_once_value(builder, INT64(0))
        parts = [counter, count, batch, *cgutils.unpack_tuple(builder, members)]
        data = cgutils.alloca_once_value(builder, cgutils.pack_struct(builder, parts))
        worker = _worker(context, builder.module, compiled, data.type.pointee)
        data = builder.bitcast(data, BYTES)
        alone = builder.icmp_signed("<=", threads, INT64(1))
        with builder.if_else(alone) as (serial, parallel):
            with serial:
                builder.call(worker, [data])
            with parallel:
                fork = cgutils.get_or_insert_function(builder.module, FORK_TYPE, FORK)
                pointer = builder.bitcast(worker, BYTES)
                n = builder.trunc(threads, INT32)
                builder.call(fork, [pointer, data, n, INT32(0)])
        return context.get_dummy_value()

    number = types.int64
    return types.void(number, number, number, body, args), codegen


def _worker(context: Any, module: Any, compiled: Any, record: Any) -> Any:
    """void worker(data): take batches of numbers, call the body, until none is left."""
    kind = ir.FunctionType(ir.VoidType(), [BYTES])
    name = module.get_unique_name(f"worker.{compiled.fndesc.mangled_name}")
    worker = ir.Function(module, kind, name)
    worker.linkage = "internal"
    builder = ir.IRBuilder(worker.append_basic_block("entry"))
    data = builder.bitcast(worker.args[0], record.as_pointer())
    counter, count, batch, *args = cgutils.unpack_tuple(builder, builder.load(data))
    take, work, done = (worker.append_basic_block(n) for n in ("take", "work", "done"))
    builder.branch(take)
    builder.position_at_end(take)
    start = builder.atomic_rmw("add", counter, batch, "acq_rel")
    builder.cbranch(builder.icmp_signed("<", start, count), work, done)
    builder.position_at_end(work)
    end = builder.add(start, batch)
    end = builder.select(builder.icmp_signed("<", end, count), end, count)
    with cgutils.for_range_slice(builder, start, end, INT64(1), INT64) as (i, _):
        signature = compiled.signature
        context.call_internal_no_propagate(
            builder, compiled.fndesc, signature, [i, *args]
        )
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
    return worker
