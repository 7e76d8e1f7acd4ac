"""A whole forward of the Llama family for a few tokens in fp32 on the CPU, as one compiled function. Needs numba.

Values are kept as columns, (features, columns): a column is a token, and their number is a multiple of 8. Several
threads call `forward` at once with the same arguments and share the work: a phase (a product, the attention of a layer)
is cut into pieces, each thread takes the next piece that nobody has taken, and a phase is over when all its pieces are
done. A thread that comes late or is held up delays nobody, and one thread alone does everything. A piece is computed in
the same way by whichever thread, and a column in the same way whatever is beside it, so neither the number of threads
nor that of columns changes a bit of a result.

Products keep 4 rows x 16 columns of results in vector registers and fetch the next rows of the weight ahead: on
AVX2 cores twice as fast as BLAS for 16 columns.
"""

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numba import carray, njit, types

from rlkit.generation.cpu import tiles
from rlkit.generation.cpu.tiles import (
    OPTIONS,
    attend,
    exact,
    exp,
    fetch,
    fetch_add,
    floats_at,
    give_way,
    normalise,
    product,
    rotate,
)  # fmt: skip

__all__ = ["PHASES", "SHARED", "forward", "private_size"]

SHARED = ("layers", "hidden", "inner", "heads", "key heads", "head width", "sequences", "columns")
"""Entries of `shape`."""

PHASES = 5
"""Phases of a layer; the head is one more."""

_PIECE = 32  # rows of a weight in a piece
_HEAD_PIECE = 64


@exact
def _address(array):
    return np.int64(array.ctypes.data)


@exact
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
        rotate(heads, key_row, column, cos, sin, norms[1], floats[3], np.float32(1), keys[place])
        for d in range(width):
            values[place, d] = heads[value_row + d, column]
        for g in range(groups):
            row = (head * groups + g) * width
            rotate(heads, row, column, cos, sin, norms[0], floats[2], floats[4], query)
            attend(query, keys, values, first, place, scores, result)
            for d in range(width):
                attended[row + d, column] = result[d]
        place += 1


@exact
def _end(phase, pieces):
    """Wait until all pieces of a phase are done."""
    tries = 0
    while fetch(phase + 64) < pieces:
        tries += 1
        if tries > 100:
            give_way()


@exact
def _pieces(rows, piece):
    return (rows + piece - 1) // piece


@exact
def _products_phase(phase, addresses, first, rows, depth, x, columns, out, add):
    """Up to three products of the same x, one below the other in out, from the layer's product `first` on.

    `rows` (3,) says how many rows they have; 0 for one that is not there.
    """
    one = _pieces(rows[0], _PIECE)
    two = one + _pieces(rows[1], _PIECE)
    pieces = two + _pieces(rows[2], _PIECE)
    while True:
        piece = fetch_add(phase)
        if piece >= pieces:
            break
        which, row, before = 0, piece * _PIECE, 0
        if piece >= two:
            which, row, before = 2, (piece - two) * _PIECE, rows[0] + rows[1]
        elif piece >= one:
            which, row, before = 1, (piece - one) * _PIECE, rows[0]
        count = min(_PIECE, rows[which] - row)
        weight, bias = addresses[first + which] + 4 * row * depth, addresses[7 + first + which] + 4 * row
        product(weight, bias, count, depth, x, columns, out + 4 * (before + row) * columns, add)
        fetch_add(phase + 64)


@exact
def _gate_phase(phase, addresses, inner, depth, x, columns, out, room):
    """silu(gate) * up into out (inner, columns)."""
    pieces = _pieces(inner, _PIECE)
    gate = _address(room)
    up = gate + 4 * _PIECE * columns
    size = _PIECE * columns
    while True:
        piece = fetch_add(phase)
        if piece >= pieces:
            break
        row = piece * _PIECE
        count = min(_PIECE, inner - row)
        product(addresses[4] + 4 * row * depth, addresses[11] + 4 * row, count, depth, x, columns, gate, np.int64(0))
        product(addresses[5] + 4 * row * depth, addresses[12] + 4 * row, count, depth, x, columns, up, np.int64(0))
        for c in range(count):
            for i in range(columns):
                value = room[c * columns + i]
                out[row + c, i] = value / (np.float32(1) + exp(-value)) * room[size + c * columns + i]
        fetch_add(phase + 64)


@exact
def _head_phase(phase, addresses, epsilon, spans, x, normed, power, room, logits):
    """Logits of the last column of each sequence. Those columns are moved to the front of x's norm."""
    sequences, vocabulary = logits.shape
    hidden, columns = x.shape
    pieces = _pieces(vocabulary, _HEAD_PIECE)
    if fetch(phase) < pieces:
        norm = carray(floats_at(addresses[14]), (hidden,))
        normalise(x, hidden, columns, norm, epsilon, normed, power)
        wide = (sequences + 7) // 8 * 8
        flat = normed.reshape(-1)
        for h in range(hidden):  # in place: what is written lies before what is still to be read
            for s in range(sequences):
                flat[h * wide + s] = normed[h, spans[s, 1] - 1]
            for s in range(sequences, wide):
                flat[h * wide + s] = np.float32(0)
        while True:
            piece = fetch_add(phase)
            if piece >= pieces:
                break
            row = piece * _HEAD_PIECE
            count = min(_HEAD_PIECE, vocabulary - row)
            weight, bias = addresses[0] + 4 * row * hidden, addresses[7] + 4 * row
            product(weight, bias, count, hidden, _address(normed), wide, _address(room), np.int64(0))
            for s in range(sequences):
                for r in range(count):
                    logits[s, row + r] = room[r * wide + s]
            fetch_add(phase + 64)
    _end(phase, pieces)


def _forward(
    thread, shape, addresses, floats, spans, x, cos, sin, heads, attended, gated, private, stored, work, logits
):
    """The logits after the last column of each sequence; every thread that works on it calls this.

    Args:
        thread: index of the calling thread, for its own room in `private`.
        shape: (8,) int64, see `SHARED`; columns is a multiple of 8, those after the last sequence are zero.
        addresses: (layers + 1, 18) int64 of fp32 weights: 7 products (query, key, value, out, gate, up, down), their 7
            biases, 4 norms (before attention, before the MLP, of queries, of keys). A bias that is not there is an
            address of zeros, a norm that is not there 0. The last row has the head (0 and 7) and the last norm (14).
        floats: (layers + 1, 5) float32: the epsilon of each of the norms, the scale of the scores.
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
    layers, hidden, inner, query_heads, key_heads, width, sequences, columns = shape
    query_rows, key_rows = query_heads * width, key_heads * width
    none, one, three, six = (
        np.int64(0),
        np.int64(1),
        np.int64(3),
        np.int64(6),
    )  # literals have other types
    rows, only = (query_rows, key_rows, key_rows), (hidden, none, none)
    mine = private[thread]
    normed = mine[: hidden * columns].reshape(hidden, columns)
    power, room = mine[hidden * columns : (hidden + 1) * columns], mine[(hidden + 1) * columns :]
    x_address, normed_address = _address(x), _address(normed)
    for layer in range(layers):
        phase = _address(work) + 128 * PHASES * layer
        mapped = addresses[layer]
        pieces = _pieces(query_rows, _PIECE) + 2 * _pieces(key_rows, _PIECE)
        if fetch(phase) < pieces:  # else nothing is left to take, and x may be changing already
            norm = carray(floats_at(mapped[14]), (hidden,))
            normalise(x, hidden, columns, norm, floats[layer, 0], normed, power)
            _products_phase(phase, mapped, none, rows, hidden, normed_address, columns, _address(heads), none)
        _end(phase, pieces)
        phase += 128
        pieces = sequences * key_heads
        while True:
            piece = fetch_add(phase)
            if piece >= pieces:
                break
            sequence, head = piece // key_heads, piece % key_heads
            span = spans[sequence]
            keys, values = stored[layer, 0, sequence, head], stored[layer, 1, sequence, head]
            _attend_sequence(
                head, span[:2], span[2], span[3], heads, cos, sin, mapped[16:], floats[layer], keys, values,
                query_heads // key_heads, attended, room,
            )  # fmt: skip
            fetch_add(phase + 64)
        _end(phase, pieces)
        phase += 128
        _products_phase(phase, mapped, three, only, query_rows, _address(attended), columns, x_address, one)
        _end(phase, _pieces(hidden, _PIECE))
        phase += 128
        pieces = _pieces(inner, _PIECE)
        if fetch(phase) < pieces:
            norm = carray(floats_at(mapped[15]), (hidden,))
            normalise(x, hidden, columns, norm, floats[layer, 1], normed, power)
            _gate_phase(phase, mapped, inner, hidden, normed_address, columns, gated, room)
        _end(phase, pieces)
        phase += 128
        _products_phase(phase, mapped, six, only, inner, _address(gated), columns, x_address, one)
        _end(phase, _pieces(hidden, _PIECE))
    _head_phase(
        _address(work) + 128 * PHASES * layers, addresses[layers], floats[layers, 0], spans, x, normed, power, room,
        logits,
    )  # fmt: skip


def private_size(hidden: int, width: int, columns: int, capacity: int) -> int:
    """Floats of room that a thread of `forward` needs."""
    return (hidden + 1 + 2 * max(_PIECE, _HEAD_PIECE)) * columns + 2 * width + capacity


def _compile() -> Any:
    """`_forward`, compiled for this machine and kept on disk where there is a place for that."""
    matrix, table, whole = types.float32[:, ::1], types.int64[:, ::1], types.int64
    shape, stored = types.UniTuple(whole, len(SHARED)), types.float32[:, :, :, :, :, ::1]
    signature = types.void(whole, shape, table, matrix, table, *[matrix] * 7, stored, table, matrix)
    try:
        # numba looks only at the file of the function itself to see whether what it kept is still right
        source = b"".join(Path(str(file)).read_bytes() for file in (__file__, tiles.__file__))
        _forward.__qualname__ = f"_forward_{crc32(source):08x}"
        return njit(signature, cache=True, **OPTIONS)(_forward)
    except (RuntimeError, OSError):  # neither the package's folder nor the user's can be written to, or a disk is full
        return njit(signature, **OPTIONS)(_forward)


forward = _compile()
"""`_forward`, compiled when this module is first imported."""
