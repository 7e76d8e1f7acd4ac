"""A whole forward of the Llama family for a few tokens in fp32 on the CPU, as one compiled function. Needs numba.

Values are kept as columns, (features, columns): a column is a token, and their number is a multiple of 8. Several
threads call `forward` at once with the same arguments and share the work: a phase (a product, the attention of a layer)
is cut into pieces, each thread takes the next piece that nobody has taken, and a phase is over when all its pieces are
done. A thread that comes late or is held up delays nobody, and one thread alone does everything. A piece is computed in
the same way by whichever thread, and a column in the same way whatever is beside it, so neither the number of threads
nor that of columns changes a bit of a result.

Products keep 4 rows x 16 columns of results in vector registers and fetch the next rows of the weight ahead: on two
AVX2 cores 1.6 times as fast as BLAS for 16 columns.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["FLOATS", "PHASES", "SHARED", "WEIGHTS", "forward", "private_size", "product"]

WEIGHTS = ("query", "key", "value", "out", "gate", "up", "down")
"""Products of a layer, in the order of the address table: their weights, then their biases, then the four norms (before
attention, before the MLP, of queries and of keys)."""

SHARED = ("layers", "hidden", "inner", "heads", "key heads", "head width", "sequences", "columns", "capacity", "vocabulary")
"""Entries of `shape`."""

FLOATS = ("epsilon before attention", "before the MLP", "of queries", "of keys", "scale of scores")
"""Entries of a row of `floats`."""

PHASES = 5
"""Phases of a layer; the head is one more."""

_PIECE = 32  # rows of a weight in a piece
_HEAD_PIECE = 64
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

    def typed(typingctx: Any, weight: Any, bias: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, depth: Any, add: Any) -> Any:
        return types.void(*[types.int64] * 8), codegen

    return intrinsic(typed)


_tile_4_16, _tile_4_8, _tile_1_16, _tile_1_8 = _tile(4, 16), _tile(4, 8), _tile(1, 16), _tile(1, 8)


@intrinsic
def _floats(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _pointer(builder, args[0], _FLOAT)

    return types.CPointer(types.float32)(types.int64), codegen


@intrinsic
def _fetch_add(typingctx: Any, address: Any) -> Any:
    """Atomically adds one; what was there before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _INDEX), _INDEX(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def _fetch(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0], _INDEX), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2 ** exponent for an int32 in [-126, 127], by its bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(args[0], _WORD(127)), _WORD(23)), _FLOAT)

    return types.float32(types.int32), codegen


_give_way = types.ExternalFunction("sched_yield", types.int32())
_inner = njit(nogil=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")


@njit(nogil=True, fastmath={"contract"}, error_model="numpy")
def _exp(x):
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


@_inner
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


@_inner
def _normalise(x, hidden, columns, weight, epsilon, out, power):
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


@_inner
def _rotate(heads, first, column, cos, sin, norm, epsilon, scale, out):
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
            weight = carray(_floats(norm), (width,))
            low, high = low * weight[d], high * weight[half + d]
        out[d] = low * cos[column, d] - high * sin[column, d]
        out[half + d] = high * cos[column, half + d] + low * sin[column, half + d]


@_inner
def _attend(query, keys, values, first, last, scores, out):
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
        scores[w] = _exp(scores[w] - highest)
        total += scores[w]
    out[:] = np.float32(0)
    for w in range(first, last + 1):
        share = scores[w] / total
        for d in range(width):
            out[d] += share * values[w, d]


@_inner
def _attend_sequence(head, columns, place, first, heads, cos, sin, norms, floats, keys, values, groups, attended, room):
    """Attention of one key head over one sequence, whose tokens are the columns `columns`[0] to `columns`[1].

    Each token's key and value go into the cache before its queries, so a token sees those before it and itself.
    `place` is the first token's in `keys` and `values` (capacity, D); those before `first` are padding.
    """
    width = cos.shape[1]
    query, result, scores = room[:width], room[width : 2 * width], room[2 * width :]
    all_heads = heads.shape[0] // width
    key_heads = (all_heads - attended.shape[0] // width) // 2
    key_row = (all_heads - 2 * key_heads + head) * width
    value_row = key_row + key_heads * width
    for column in range(columns[0], columns[1]):
        _rotate(heads, key_row, column, cos, sin, norms[1], floats[3], np.float32(1), keys[place])
        for d in range(width):
            values[place, d] = heads[value_row + d, column]
        for g in range(groups):
            row = (head * groups + g) * width
            _rotate(heads, row, column, cos, sin, norms[0], floats[2], floats[4], query)
            _attend(query, keys, values, first, place, scores, result)
            for d in range(width):
                attended[row + d, column] = result[d]
        place += 1


@_inner
def _end(phase, pieces):
    """Wait until all pieces of a phase are done."""
    tries = 0
    while _fetch(phase + 64) < pieces:
        tries += 1
        if tries > 100:
            _give_way()


@_inner
def _pieces(rows, piece):
    return (rows + piece - 1) // piece


@_inner
def _product_phase(phase, weight, bias, rows, depth, x, columns, out, add):
    """All of a product, by as many threads as come."""
    pieces = _pieces(rows, _PIECE)
    while True:
        piece = _fetch_add(phase)
        if piece >= pieces:
            break
        row = piece * _PIECE
        count = min(_PIECE, rows - row)
        product(weight + 4 * row * depth, bias + 4 * row, count, depth, x, columns, out + 4 * row * columns, add)
        _fetch_add(phase + 64)
    _end(phase, pieces)


@_inner
def _heads_phase(phase, addresses, rows, depth, x, columns, out):
    """Queries, keys and values; `rows` has the rows of each."""
    ends = (_pieces(rows[0], _PIECE), _pieces(rows[0], _PIECE) + _pieces(rows[1], _PIECE))
    pieces = ends[1] + _pieces(rows[2], _PIECE)
    while True:
        piece = _fetch_add(phase)
        if piece >= pieces:
            break
        which = (piece >= ends[0]) + (piece >= ends[1])
        row, before = piece * _PIECE, 0
        if which == 1:
            row, before = (piece - ends[0]) * _PIECE, rows[0]
        elif which == 2:
            row, before = (piece - ends[1]) * _PIECE, rows[0] + rows[1]
        count = min(_PIECE, rows[which] - row)
        weight, bias = addresses[which] + 4 * row * depth, addresses[7 + which] + 4 * row
        product(weight, bias, count, depth, x, columns, out + 4 * (before + row) * columns, 0)
        _fetch_add(phase + 64)
    _end(phase, pieces)


@_inner
def _gate_phase(phase, addresses, inner, depth, x, columns, out, room):
    """silu(gate) * up into out (inner, columns)."""
    pieces = _pieces(inner, _PIECE)
    gate = room.ctypes.data
    up = gate + 4 * _PIECE * columns
    size = _PIECE * columns
    while True:
        piece = _fetch_add(phase)
        if piece >= pieces:
            break
        row = piece * _PIECE
        count = min(_PIECE, inner - row)
        product(addresses[4] + 4 * row * depth, addresses[11] + 4 * row, count, depth, x, columns, gate, 0)
        product(addresses[5] + 4 * row * depth, addresses[12] + 4 * row, count, depth, x, columns, up, 0)
        for c in range(count):
            for i in range(columns):
                value = room[c * columns + i]
                out[row + c, i] = value / (np.float32(1) + _exp(-value)) * room[size + c * columns + i]
        _fetch_add(phase + 64)
    _end(phase, pieces)


@_inner
def _head_phase(phase, addresses, epsilon, spans, x, normed, power, room, logits):
    """Logits of the last column of each sequence. Those columns are moved to the front of x's norm."""
    sequences, vocabulary = logits.shape
    hidden, columns = x.shape
    pieces = _pieces(vocabulary, _HEAD_PIECE)
    if _fetch(phase) < pieces:
        norm = carray(_floats(addresses[14]), (hidden,))
        _normalise(x, hidden, columns, norm, epsilon, normed, power)
        wide = (sequences + 7) // 8 * 8
        flat = normed.reshape(-1)
        for h in range(hidden):  # in place: what is written lies before what is still to be read
            for s in range(sequences):
                flat[h * wide + s] = normed[h, spans[s, 1] - 1]
            for s in range(sequences, wide):
                flat[h * wide + s] = np.float32(0)
        while True:
            piece = _fetch_add(phase)
            if piece >= pieces:
                break
            row = piece * _HEAD_PIECE
            count = min(_HEAD_PIECE, vocabulary - row)
            weight, bias = addresses[0] + 4 * row * hidden, addresses[7] + 4 * row
            product(weight, bias, count, hidden, normed.ctypes.data, wide, room.ctypes.data, 0)
            for s in range(sequences):
                for r in range(count):
                    logits[s, row + r] = room[r * wide + s]
            _fetch_add(phase + 64)
    _end(phase, pieces)


def _forward(thread, shape, addresses, floats, spans, x, cos, sin, heads, attended, gated, private, stored, work, logits):
    """The logits after the last column of each sequence; every thread that works on it calls this.

    Args:
        thread: index of the calling thread, for its own room in `private`.
        shape: (10,) int64, see `SHARED`; columns is a multiple of 8, those after the last sequence are zero.
        addresses: (layers + 1, 18) int64 of fp32 weights, see `WEIGHTS`; a bias that is not there is an address of
            zeros, a norm of queries and keys that is not there is 0. The last row has the head's weight (0) and bias
            (7) and the last norm (14).
        floats: (layers + 1, 5) float32, see `FLOATS`.
        spans: (sequences, 4) int64: first column and the one after the last, the first column's place in the cache,
            the first place attended to.
        x: (hidden, columns) float32, embeddings; overwritten.
        cos, sin: (columns, head width) float32, the rotation's table.
        heads, attended, gated: room for (heads + 2 * key heads) * head width, heads * head width and inner rows of
            (columns,) float32; `attended` starts as zeros.
        private: (threads, `private_size`) float32.
        stored: (layers, 2, sequences, key heads, capacity, head width) float32, the cache; written to.
        work: (layers * `PHASES` + 1, 16) int64 zeros.
        logits: (sequences, vocabulary) float32; written to.
    """
    layers, hidden, inner, query_heads, key_heads, width, sequences, columns, capacity, vocabulary = shape
    query_rows, key_rows = query_heads * width, key_heads * width
    rows = (query_rows, key_rows, key_rows)
    mine = private[thread]
    normed = mine[: hidden * columns].reshape(hidden, columns)
    power, room = mine[hidden * columns : (hidden + 1) * columns], mine[(hidden + 1) * columns :]
    x_address, normed_address, gated_address = x.ctypes.data, normed.ctypes.data, gated.ctypes.data
    for layer in range(layers):
        phase = work.ctypes.data + 128 * PHASES * layer
        mapped = addresses[layer]
        if _fetch(phase) < _pieces(query_rows, _PIECE) + 2 * _pieces(key_rows, _PIECE):
            norm = carray(_floats(mapped[14]), (hidden,))
            _normalise(x, hidden, columns, norm, floats[layer, 0], normed, power)
            _heads_phase(phase, mapped, rows, hidden, normed_address, columns, heads.ctypes.data)
        phase += 128
        pieces = sequences * key_heads
        while True:
            piece = _fetch_add(phase)
            if piece >= pieces:
                break
            sequence, head = piece // key_heads, piece % key_heads
            span = spans[sequence]
            keys, values = stored[layer, 0, sequence, head], stored[layer, 1, sequence, head]
            _attend_sequence(
                head, span[:2], span[2], span[3], heads, cos, sin, mapped[16:], floats[layer], keys, values,
                query_heads // key_heads, attended, room,
            )  # fmt: skip
            _fetch_add(phase + 64)
        _end(phase, pieces)
        phase += 128
        _product_phase(phase, mapped[3], mapped[10], hidden, query_rows, attended.ctypes.data, columns, x_address, 1)
        phase += 128
        if _fetch(phase) < _pieces(inner, _PIECE):
            norm = carray(_floats(mapped[15]), (hidden,))
            _normalise(x, hidden, columns, norm, floats[layer, 1], normed, power)
            _gate_phase(phase, mapped, inner, hidden, normed_address, columns, gated, room)
        phase += 128
        _product_phase(phase, mapped[6], mapped[13], hidden, inner, gated_address, columns, x_address, 1)
    _head_phase(
        work.ctypes.data + 128 * PHASES * layers, addresses[layers], floats[layers, 0], spans, x, normed, power, room,
        logits,
    )  # fmt: skip


def private_size(hidden: int, width: int, columns: int, capacity: int) -> int:
    """Floats of room that a thread of `forward` needs."""
    return (hidden + 1 + 2 * max(_PIECE, _HEAD_PIECE)) * columns + 2 * width + capacity


def _compile(function: Callable[..., None], signature: Any) -> Any:
    """Compiled for this machine, kept on disk where there is a place for that."""
    options = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy"}
    try:
        return njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # neither the package's folder nor the user's can be written to, or a disk is full
        return njit(signature, **options)(function)


_matrix, _whole = types.float32[:, ::1], types.int64
forward: Any = _compile(
    _forward,
    types.void(
        _whole, types.UniTuple(_whole, len(SHARED)), types.int64[:, ::1], _matrix, types.int64[:, ::1],
        *[_matrix] * 7, types.float32[:, :, :, :, :, ::1], types.int64[:, ::1], _matrix,
    ),
)  # fmt: skip
"""`_forward`, compiled when this module is first imported."""
