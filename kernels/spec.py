"""What every kernel computes, in a few lines of plain torch: the oracle.

The fast versions have the same names, arguments and variables and are tested against
this file. It knows tensors only; nothing here is fast. Chapter 06 reads it aloud.

KV layout, stated once: one layer's cache is two tensors, `k_cache` and `v_cache`, both
[num_blocks, kv_heads, block_size, head_dim] and contiguous. The key of the token in
slot s, slot = block * block_size + offset, stands in row k_cache[block, head, offset].
So one KV head's part of a block is one run of block_size * head_dim numbers in memory.
Block 0 is the null block: tables are filled up with it, and it is never read.

Outputs are written in place. Last dimensions are contiguous; the rows of `q`, `k`, `v`,
`key`, `value` and `x` may be strided, so that they can be views of one fused matrix.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

COLUMNS = 16  # outputs in a panel of weights, where no one asks for another number


def empty_kv(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One layer's (k_cache, v_cache), uninitialised: untouched pages take no memory."""
    shape = (num_blocks, kv_heads, block_size, head_dim)
    return torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)


def native(x: Tensor) -> Tensor:
    """What these kernels take without converting it, over the memory of x: x itself."""
    return x


def pack(weight: Tensor, columns: int = COLUMNS) -> Tensor:
    """panels[p, k, j] = weight[columns p + j, k], zero past the last row.

    [N / columns, K, columns]: some outputs' weights stand side by side for each input,
    so that a product reads a panel from end to end, once, and holds its sums in vector
    registers. How many fit is the processor's affair.
    """
    n, k = weight.shape
    if n % columns:
        weight = pad(weight, (0, 0, 0, -n % columns))
    return weight.view(-1, columns, k).transpose(1, 2).contiguous()


def linear(out: Tensor, x: Tensor, panels: Tensor) -> None:
    """out = x weight.T for panels = pack(weight): x [rows, K], out [rows, N]."""
    weight = panels.transpose(1, 2).reshape(-1, x.shape[1])[: out.shape[1]]
    out.copy_(x @ weight.T)


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """k_cache[slots[t]] = key[t], v_cache[slots[t]] = value[t], for every KV head.

    key, value [tokens, kv_heads, head_dim]; slots int64 [tokens], no two alike.
    """
    block_size = k_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = key
    v_cache[block, :, offset] = value


def decode_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """One query a sequence, the last of its context: prefill_attention with n_s = 1.

    out, q [seqs, heads, head_dim]; tables int32 [seqs, max_blocks];
    lengths int32 [seqs], each >= 1.
    """
    query_starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    prefill_attention(
        out,
        q,
        k_cache,
        v_cache,
        tables,
        query_starts,
        lengths,
        scale,
        window,
        softcap,
    )


def prefill_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """softmax(cap(scale * q . k)) v over the context that each query may see.

    out, q [tokens, heads, head_dim]; sequence s owns rows query_starts[s] to
    query_starts[s + 1] (int32 [seqs + 1]), n_s of them. lengths[s] (int32 [seqs]) is
    its context, these tokens included, so that row i of s stands at position
    p = lengths[s] - n_s + i and reads positions 0..p, or p-w+1..p with window = w > 0.
    cap(x) = softcap * tanh(x / softcap), or x where softcap is 0. Query head h reads KV
    head h // (heads / kv_heads). Position p is in block tables[s, p // block_size].
    """
    for s, length in enumerate(lengths.tolist()):
        start, end = query_starts[s : s + 2].tolist()
        n = end - start
        k = _context(k_cache, tables[s], length, q.shape[1])  # [heads, length, dim]
        v = _context(v_cache, tables[s], length, q.shape[1])
        j = torch.arange(length, device=q.device)
        p = j[length - n :, None]
        seen = (j <= p) & (j > p - window) if window else j <= p
        scores = scale * (q[start:end].transpose(0, 1) @ k.transpose(1, 2))
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[start:end] = (weights @ v).transpose(0, 1)


def _context(cache: Tensor, table: Tensor, length: int, heads: int) -> Tensor:
    """The first `length` rows of a sequence, gathered: [heads, length, head_dim]."""
    _, kv_heads, block_size, head_dim = cache.shape
    blocks = table[: -(-length // block_size)].long()
    rows = cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length]
    # Positions behind the window may lie in the null block; whatever stands there has
    # weight 0, and 0 * NaN must not reach the sum.
    return rows.nan_to_num().repeat_interleave(heads // kv_heads, dim=0)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row: [..., dim].

    `out` may be `x` itself.
    """
    out.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight)


def add_rms_norm(
    out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float
) -> None:
    """residual += x; out = rms_norm(residual): [rows, dim]. `out` may be `x` itself."""
    residual += x
    rms_norm(out, residual, weight, eps)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Turn the pairs (x[i], x[i + r/2]) of every head by its position's angle.

    In place: (a, b) -> (a cos - b sin, b cos + a sin), r = rotary_dim <= head_dim; the
    rest of a head stays. q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim],
    positions int64 [tokens], cos_sin [max_len, r]: row p is r/2 cosines, r/2 sines.
    """
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, r/2]
    for x in (q, k):
        a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
        x[..., :half] = a * cos - b * sin
        x[..., half : 2 * half] = b * cos + a * sin


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
    """rotary of q and k, then write_kv of k and v."""
    rotary(q, k, positions, cos_sin)
    write_kv(k, v, k_cache, v_cache, slots)


def silu_mul(out: Tensor, gate_up: Tensor) -> None:
    """out = silu(gate) up, silu(x) = x / (1 + e^-x); gate_up [rows, 2F] = gate, up."""
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def gelu_tanh_mul(out: Tensor, gate_up: Tensor) -> None:
    """out = gelu(gate) up, gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def silu_linear(out: Tensor, x: Tensor, panels: Tensor) -> None:
    """silu_mul of x [gate up].T: panels = pack([gate; up]), out [rows, F], and
    F is a whole number of panels."""
    gate_up = x.new_empty(len(x), 2 * out.shape[1])
    linear(gate_up, x, panels)
    silu_mul(out, gate_up)


def gelu_tanh_linear(out: Tensor, x: Tensor, panels: Tensor) -> None:
    """gelu_tanh_mul of x [gate up].T, as silu_linear."""
    gate_up = x.new_empty(len(x), 2 * out.shape[1])
    linear(gate_up, x, panels)
    gelu_tanh_mul(out, gate_up)


# For GPUs alone, for now: processors have no fast version of what follows.
def cascade_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    shared: int,
    scale: float,
    softcap: float,
) -> None:
    """prefill_attention without a window, where all contexts begin alike.

    Positions before `shared`, all of them before every query, stand in the same blocks
    for all sequences: reading them once for all is what a fast version is for.
    """
    assert all((lengths - query_starts.diff() >= shared).tolist())
    args = k_cache, v_cache, tables, query_starts, lengths, scale, 0, softcap
    prefill_attention(out, q, *args)


def copy_blocks(
    k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor
) -> None:
    """k_cache[targets[i]] = k_cache[sources[i]], and v_cache's likewise, whole blocks.

    sources, targets int64 [copies]; no target twice, and none that is a source.
    """
    k_cache[targets] = k_cache[sources]
    v_cache[targets] = v_cache[sources]


def grouped_linear(
    out: Tensor, x: Tensor, weights: Tensor, sources: Tensor, starts: Tensor
) -> None:
    """out[i] = weights[e] x[sources[i]] for starts[e] <= i < starts[e + 1], every e.

    x [tokens, K]; weights [experts, N, K]; out [rows, N]; sources int64 [rows]: the
    token whose numbers a row takes, rows sorted by expert; starts int64 [experts + 1].
    """
    for e, weight in enumerate(weights):
        start, end = starts[e : e + 2].tolist()
        out[start:end] = x[sources[start:end]] @ weight.T


def penalize(
    logits: Tensor,
    ids: Tensor,
    counts: Tensor,
    starts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """x / repetition where x > 0, else x repetition; then less frequency count, and
    presence where count > 0: for the tokens that each row of logits [rows, V] has seen.

    Row r has seen ids[i], all distinct, starts[r] <= i < starts[r + 1], and generated
    it counts[i] times (int64 [entries]; starts int64 [rows + 1]). Logits and repetition
    are float32, frequency and presence float64 [rows].
    """
    for r, row in enumerate(logits):
        mine = slice(*starts[r : r + 2].tolist())
        x, count = row[ids[mine]], counts[mine]
        x = torch.where(x > 0, x / repetition[r], x * repetition[r])
        drop = frequency[r] * count + presence[r] * (count > 0)
        row[ids[mine]] = x - drop.float()


def sample(
    out: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> None:
    """One token a row, out int64 [rows], from float32 logits [rows, V].

    Where temperature is 0, the largest logit. Else tokens weigh
    e^((x - largest) / temperature), and those stay that weigh min_p or more; of these
    the top_k largest logits (0: all); of these the fewest largest weights which make
    up top_p of their sum. The token is the first id whose running sum of weights
    exceeds uniform times their sum. Of equal values the lower id comes first.
    temperature, min_p float32 [rows]; top_p, uniform in [0, 1) float64; top_k int32.
    -1 where the largest logit, a NaN counted as such, is not finite.
    """
    for r, row in enumerate(logits):
        if not row.max().isfinite():
            out[r] = -1
            continue
        order = row.sort(descending=True, stable=True).indices
        if temperature[r] == 0:
            out[r] = order[0]
            continue
        ids = order[: int(top_k[r]) or None].sort().values
        weights = ((row[ids] - row.max()) / temperature[r]).exp()
        ids, weights = ids[weights >= min_p[r]], weights[weights >= min_p[r]]
        order = weights.sort(descending=True, stable=True).indices
        sums = weights[order].double().cumsum(0)
        n = int((sums < top_p[r] * sums[-1]).sum()) + 1
        kept = order[:n].sort().values
        ids, weights = ids[kept], weights[kept]
        sums = weights.double().cumsum(0)
        last = int((sums < sums[-1]).sum())
        out[r] = ids[min(int((sums <= uniform[r] * sums[-1]).sum()), last)]
