"""Parts of the compiled function: products in vector registers, norms, attention of one query, atomic counters."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "OPTIONS",
    "attend",
    "exact",
    "exp",
    "fetch",
    "fetch_add",
    "floats_at",
    "give_way",
    "normalise",
    "product",
    "rotate",
]

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
exact = njit(**OPTIONS)
reordered = njit(
    **{**OPTIONS, "fastmath": {"contract", "reassoc", "nsz"}}
)  # by the compiler, so always in the same way
_FLOAT, _WORD, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_UNROLLED = 16  # floats of a cache line


def _pointer(builder: Any, address: Any, to: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(to))


def _load(builder: Any, base: Any, index: Any, width: int) -> Any:
    """`width` floats from base[index]; one float is repeated in no vector."""
    place = builder.gep(base, [index])
    if width > 1:
        place = builder.bitcast(place, ir.PointerType(ir.VectorType(_FLOAT, width)))
    return builder.load(place, align=4)


def _repeat(builder: Any, value: Any, width: int) -> Any:
    kind = ir.VectorType(_FLOAT, width)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_WORD, width), [0] * width))


def _tile(rows: int, width: int) -> Any:
    """Compiled (weight, bias, x, stride of x, out, stride of out, K, add): a product's `rows` x `width` results."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight, bias, x, x_stride, out, out_stride, depth, add = args
        weight, bias, x, out = (_pointer(builder, address, _FLOAT) for address in (weight, bias, x, out))
        kind = ir.VectorType(_FLOAT, width)
        sums = [cgutils.alloca_once(builder, kind) for _ in range(rows)]
        for total in sums:
            builder.store(ir.Constant(kind, None), total)
        starts = [builder.gep(weight, [builder.mul(_INDEX(row), depth)]) for row in range(rows)]
        prefetch_type = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8)), _WORD, _WORD, _WORD])
        prefetch = cgutils.get_or_insert_function(builder.module, prefetch_type, "llvm.prefetch.p0")

        def add_products(k: Any) -> None:
            column = _load(builder, x, builder.mul(k, x_stride), width)
            for start, total in zip(starts, sums, strict=True):
                factor = _repeat(builder, _load(builder, start, k, 1), width)
                term = builder.fmul(factor, column, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), term, flags=("contract",)), total)

        lines = builder.sdiv(depth, _INDEX(_UNROLLED))
        ahead = builder.mul(_INDEX(rows), depth)  # the same place of the next rows
        with cgutils.for_range(builder, lines) as loop:
            first = builder.mul(loop.index, _INDEX(_UNROLLED))
            for start in starts:
                place = builder.bitcast(builder.gep(start, [builder.add(first, ahead)]), ir.PointerType(ir.IntType(8)))
                builder.call(prefetch, [place, _WORD(0), _WORD(3), _WORD(1)])
            for k in range(_UNROLLED):
                add_products(builder.add(first, _INDEX(k)))
        done = builder.mul(lines, _INDEX(_UNROLLED))
        with cgutils.for_range(builder, builder.sub(depth, done)) as loop:
            add_products(builder.add(done, loop.index))
        wanted = builder.icmp_signed("!=", add, _INDEX(0))
        for row, total in enumerate(sums):
            result = builder.fadd(builder.load(total), _repeat(builder, _load(builder, bias, _INDEX(row), 1), width))
            place = builder.mul(_INDEX(row), out_stride)
            result = builder.select(wanted, builder.fadd(_load(builder, out, place, width), result), result)
            target = builder.bitcast(builder.gep(out, [place]), ir.PointerType(kind))
            builder.store(result, target, align=4)
        return context.get_dummy_value()

    def typed(
        typingctx: Any, weight: Any, bias: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, depth: Any, add: Any
    ) -> Any:
        return types.void(*[types.int64] * 8), codegen

    return intrinsic(typed)


_tile_4_16, _tile_4_8, _tile_1_16, _tile_1_8 = _tile(4, 16), _tile(4, 8), _tile(1, 16), _tile(1, 8)


@intrinsic
def floats_at(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _pointer(builder, args[0], _FLOAT)

    return types.CPointer(types.float32)(types.int64), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any) -> Any:
    """Atomically adds one; what was there before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _INDEX), _INDEX(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def fetch(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0], _INDEX), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2 ** exponent for an int32 in [-126, 127], by its bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(args[0], _WORD(127)), _WORD(23)), _FLOAT)

    return types.float32(types.int32), codegen


give_way = types.ExternalFunction("sched_yield", types.int32())


@exact
def exp(x):
    """e ** x in float32 within 2e-7, in operations that vectorise: 2 ** n times a polynomial of |r| <= ln(2) / 2."""
    x = min(max(x, np.float32(-87)), np.float32(88))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(1 / 2)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    return p * _power_of_two(np.int32(n))


@exact
def product(weight, bias, rows, depth, x, columns, out, add):
    """A product of a few rows of a weight, by addresses.

    Args:
        weight: of the first of the rows, (rows, depth).
        bias: of the first of their biases, (rows,).
        rows, depth: the weight's shape.
        x: of (depth, columns).
        columns: a multiple of 8.
        out: of the first of their results, (rows, columns).
        add: 1 to add to what is there, 0 to overwrite it.
    """
    for row in range(0, rows - rows % 4, 4):
        column = 0
        w, b, o = weight + 4 * row * depth, bias + 4 * row, out + 4 * row * columns
        while column + 16 <= columns:
            _tile_4_16(w, b, x + 4 * column, columns, o + 4 * column, columns, depth, add)
            column += 16
        if column < columns:
            _tile_4_8(w, b, x + 4 * column, columns, o + 4 * column, columns, depth, add)
    for row in range(rows - rows % 4, rows):
        column = 0
        w, b, o = weight + 4 * row * depth, bias + 4 * row, out + 4 * row * columns
        while column + 16 <= columns:
            _tile_1_16(w, b, x + 4 * column, columns, o + 4 * column, columns, depth, add)
            column += 16
        if column < columns:
            _tile_1_8(w, b, x + 4 * column, columns, o + 4 * column, columns, depth, add)


@exact
def normalise(x, hidden, columns, weight, epsilon, out, power):
    """RMS norm of each column of x (hidden, columns) into out; `power` is room for (columns,)."""
    power[:columns] = np.float32(0)
    for h in range(hidden):
        for c in range(columns):
            power[c] += x[h, c] * x[h, c]
    for c in range(columns):
        power[c] = np.float32(1) / np.sqrt(power[c] / np.float32(hidden) + epsilon)
    for h in range(hidden):
        factor = weight[h]
        for c in range(columns):
            out[h, c] = x[h, c] * power[c] * factor


@reordered
def rotate(heads, first, column, cos, sin, norm, epsilon, scale, out):
    """A head of one token, rows `first` and on of `heads`, normed where there is a norm, rotated and scaled, to out."""
    width = cos.shape[1]
    half = width // 2
    factor = scale
    if norm != 0:
        power = np.float32(0)
        for d in range(width):
            power += heads[first + d, column] * heads[first + d, column]
        factor = scale / np.sqrt(power / np.float32(width) + epsilon)
    for d in range(half):
        low, high = heads[first + d, column] * factor, heads[first + half + d, column] * factor
        if norm != 0:
            weight = carray(floats_at(norm), (width,))
            low, high = low * weight[d], high * weight[half + d]
        out[d] = low * cos[column, d] - high * sin[column, d]
        out[half + d] = high * cos[column, half + d] + low * sin[column, half + d]


@reordered
def attend(query, keys, values, first, last, scores, out):
    """Attention of a query (D,) over places first to last of keys and values (capacity, D), into out (D,)."""
    width = len(query)
    highest = np.float32(-np.inf)
    for w in range(first, last + 1):
        score = np.float32(0)
        for d in range(width):
            score += query[d] * keys[w, d]
        scores[w] = score
        highest = max(highest, score)
    total = np.float32(0)
    for w in range(first, last + 1):
        scores[w] = exp(scores[w] - highest)
        total += scores[w]
    out[:] = np.float32(0)
    for w in range(first, last + 1):
        share = scores[w] / total
        for d in range(width):
            out[d] += share * values[w, d]
