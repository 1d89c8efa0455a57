"""Context parallelism: causal attention over sequences that are split over the cp group.

Exact, for CPU and gloo: block by block in plain torch, blocks merged by their log-sum-exp. torch
2.13's own ``torch.distributed.tensor.experimental.context_parallel`` does not run there: it raises
``NotImplementedError``, "aten._scaled_dot_product_flash_attention_for_cpu.default does not have a
sharding strategy registered", and with the math backend "mixed torch.Tensor and DTensor".

A rank holds chunks r and 2cp-1-r of 2cp (zig-zag, Llama 3, arXiv 2407.21783 section 3.3.2). Of a
block from an earlier rank all its queries then see the first half of the keys, of one from a later
rank the second half of its queries sees all keys: the same work on every rank in every hop, without
a mask. Keys and values travel packed in one message of M = B * Nkv * L * (D + Dv) * bytes per
element. Calls of one attention:

* ``ring`` (Ring Attention, arXiv 2310.01889): forward cp-1 sends of M, each under the computation
  of a block; backward another cp-1, and cp-1 of the gradients, likewise M: the gradient of a block
  starts at the rank after its owner, is added to by each rank it visits, and comes home, where the
  owner adds its own part. All travel under a block's computation but the gradients' last hop.
* ``all_gather`` (Llama 3): forward one all_gather (cp * M), backward another and one
  reduce_scatter of the gradients. Nothing is hidden.

Shapes: B batch, Nq and Nkv heads of queries and of keys, L = sequence / cp local tokens, D width of
a head of queries and keys, Dv of values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from executor.collectives.communicator import Communicator
from planner.plan import ContextExchange

__all__ = ["ContextAttention", "local_positions", "visible_part"]

_ALL: Final = slice(None)


def local_positions(seq_len: int, *, cp: int, index: int) -> torch.Tensor:
    """Return the positions, int64 [seq_len / cp], that rank ``index`` of the cp group holds.

    >>> [local_positions(8, cp=2, index=index).tolist() for index in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if cp == 1:
        return torch.arange(seq_len)
    assert seq_len % (2 * cp) == 0, f"seq_len={seq_len} must be a multiple of 2 * cp = {2 * cp}"
    chunks = torch.arange(seq_len).view(2 * cp, -1)
    return torch.cat((chunks[index], chunks[2 * cp - 1 - index]))


def visible_part(index: int, owner: int, num_tokens: int) -> tuple[slice, slice]:
    """Return which queries of rank ``index`` see which keys of rank ``owner``.

    All of those see all of those, but for a rank's own block, which is causal in local order. Both
    ranks hold ``num_tokens`` in the order of ``local_positions``.
    """
    half = num_tokens // 2
    if owner == index:
        return _ALL, _ALL
    return (_ALL, slice(half)) if owner < index else (slice(half, None), _ALL)


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Causal self-attention of the tokens of ``local_positions`` to those of the whole cp group.

    Scores, softmax and sums are fp32 at least, whatever the input; messages have the input's type.
    All ranks of the group make the same calls in the same order, backward included.

    Attributes:
        group: The cp axis; where it has one rank, torch's own attention runs and nothing is called.
        exchange: How keys and values reach the other ranks.
    """

    group: Communicator
    exchange: ContextExchange

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """Return the attention's output [B, Nq, L, Dv].

        Args:
            q: [B, Nq, L, D].
            k: [B, Nkv, L, D], Nq a multiple of Nkv.
            v: [B, Nkv, L, Dv], of the type of ``k``.
            scale: Of the scores; D**-0.5 if left out.
        """
        if self.group.size == 1:
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
        assert q.shape[-2] % 2 == 0, f"{q.shape[-2]} local tokens: must be two equal chunks"
        apply = cast(Callable[..., torch.Tensor], _BlockAttention.apply)
        own_scale = q.shape[-1] ** -0.5 if scale is None else scale
        return apply(q, k, v, own_scale, self.group, _EXCHANGES[self.exchange])


# ------------------------------------------------------------------------------- exchange


@dataclass(frozen=True, slots=True)
class _Exchange:
    """How blocks of packed keys and values come to this rank, and how their gradients leave it.

    Attributes:
        blocks: (own block, group) to (owner, block) of every rank, in the order they are there.
        send_home: (gradients of these, in that order, and group) to the own block's whole gradient.
    """

    blocks: Callable[[torch.Tensor, Communicator], Iterator[tuple[int, torch.Tensor]]]
    send_home: Callable[[Iterator[torch.Tensor], Communicator], torch.Tensor]


def _ring_blocks(own: torch.Tensor, group: Communicator) -> Iterator[tuple[int, torch.Tensor]]:
    """Pass blocks on; the next is on its way while the caller computes on the one yielded."""
    block = own
    for hop in range(group.size - 1):
        passing = group.start_ring_pass(block)
        yield (group.index - hop) % group.size, block
        block = passing.wait()
    yield (group.index + 1) % group.size, block


def _send_home_by_ring(gradients: Iterator[torch.Tensor], group: Communicator) -> torch.Tensor:
    own = next(gradients)
    passing = group.start_ring_pass(next(gradients))
    for gradient in gradients:  # computed while the sum of those before it is on its way
        passing = group.start_ring_pass(passing.wait() + gradient)
    return own + passing.wait()


def _gathered_blocks(own: torch.Tensor, group: Communicator) -> Iterator[tuple[int, torch.Tensor]]:
    yield from enumerate(group.all_gather(own.unsqueeze(0)))


def _send_home_by_scatter(gradients: Iterator[torch.Tensor], group: Communicator) -> torch.Tensor:
    return group.reduce_scatter(torch.stack(list(gradients))).squeeze(0)


_EXCHANGES: Final[dict[ContextExchange, _Exchange]] = {
    "ring": _Exchange(_ring_blocks, _send_home_by_ring),
    "all_gather": _Exchange(_gathered_blocks, _send_home_by_scatter),
}


# ------------------------------------------------------------------------------ attention


class _BlockAttention(torch.autograd.Function):
    """FlashAttention's sums (arXiv 2205.14135) with a rank's tokens as the block.

    Kept for the backward: the rank's own q, k, v, output and log-sum-exp. Letters in einsum: b
    batch, n KV heads, g query heads per KV head, q queries, k keys, d and e widths.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        group: Communicator,
        exchange: _Exchange,
    ) -> torch.Tensor:
        queries = _grouped(q, k.shape[1])
        out = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
        lse = queries.new_full(queries.shape[:-1], -torch.inf)
        for owner, block in exchange.blocks(torch.cat((k, v), dim=-1), group):
            rows, seen = visible_part(group.index, owner, k.shape[-2])
            keys, values = _unpacked(block[:, :, seen], k.shape[-1], queries.dtype)
            scores = _scores(queries[..., rows, :], keys, scale, is_causal=owner == group.index)
            merged = torch.logaddexp(lse[..., rows], scores.logsumexp(dim=-1))
            weights = (scores - merged.unsqueeze(-1)).exp()
            out[..., rows, :] *= (lse[..., rows] - merged).exp().unsqueeze(-1)
            out[..., rows, :] += torch.einsum("bngqk,bnke->bngqe", weights, values)
            lse[..., rows] = merged
        result = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.scale, ctx.group, ctx.exchange = scale, group, exchange
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_result: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, result, lse = ctx.saved_tensors
        queries, out, grad_out = (_grouped(t, k.shape[1]) for t in (q, result, grad_result))
        grad_q = torch.zeros_like(queries)
        # the softmax's part: sum over keys of weight * its gradient = output * its gradient
        delta = (out * grad_out).sum(dim=-1, keepdim=True)

        def gradients() -> Iterator[torch.Tensor]:
            for owner, block in ctx.exchange.blocks(torch.cat((k, v), dim=-1), ctx.group):
                rows, seen = visible_part(ctx.group.index, owner, k.shape[-2])
                keys, values = _unpacked(block[:, :, seen], k.shape[-1], queries.dtype)
                own_queries, own_grad = queries[..., rows, :], grad_out[..., rows, :]
                is_causal = owner == ctx.group.index
                scores = _scores(own_queries, keys, ctx.scale, is_causal=is_causal)
                weights = (scores - lse[..., rows].unsqueeze(-1)).exp()
                grad_weights = torch.einsum("bngqe,bnke->bngqk", own_grad, values)
                grad_scores = weights * (grad_weights - delta[..., rows, :]) * ctx.scale
                grad_q[..., rows, :] += torch.einsum("bngqk,bnkd->bngqd", grad_scores, keys)
                grad_keys = torch.einsum("bngqk,bngqd->bnkd", grad_scores, own_queries)
                grad_values = torch.einsum("bngqk,bngqe->bnke", weights, own_grad)
                grad_block = torch.zeros_like(block)
                grad_block[:, :, seen] = torch.cat((grad_keys, grad_values), dim=-1)
                yield grad_block

        grad_kv = ctx.exchange.send_home(gradients(), ctx.group)
        grad_k, grad_v = grad_kv.split((k.shape[-1], v.shape[-1]), dim=-1)
        return grad_q.flatten(1, 2).to(q.dtype), grad_k, grad_v, None, None, None


def _grouped(heads: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return [B, Nq, L, D] as [B, Nkv, Nq / Nkv, L, D], fp32 at least."""
    wide = torch.promote_types(heads.dtype, torch.float32)
    return heads.to(wide).reshape(heads.shape[0], num_kv_heads, -1, *heads.shape[2:])


def _unpacked(
    block: torch.Tensor, key_width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of a packed block."""
    wide = block.to(dtype)
    return wide[..., :key_width], wide[..., key_width:]


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, *, is_causal: bool
) -> torch.Tensor:
    """Return scaled scores [B, Nkv, Nq / Nkv, queries, keys]; what is not seen is -inf."""
    scores = torch.einsum("bngqd,bnkd->bngqk", queries, keys) * scale
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return scores
