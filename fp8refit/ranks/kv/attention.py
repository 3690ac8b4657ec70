"""Plain causal attention over packed sequences, in torch: for passes that must not touch an engine's KV cache.

Nothing is cached between calls but where the sequences lie, which is the same for every layer of a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_MAX_GROUP_TOKENS = 16384
"""Tokens of one batch of attention, padding included; a longer sequence is a batch of its own."""
_MAX_PADDING = 0.25
"""Largest share of padding in one batch."""
_MAX_SCORES_BYTES = 128 << 20
"""Scores in float32 that exist at a time; their softmax needs as much again."""
_MIN_CHUNK = 256
_MAX_FLASH_HEAD = 256


class PackedSequences:
    """Sequences laid one after another in one batch of tokens.

    Args:
        lengths: Tokens of each sequence.
        device: Where tokens are.

    Examples:
        >>> sequences = PackedSequences([3, 1], torch.device("cpu"))
        >>> sequences.positions
        tensor([0, 1, 2, 0])
        >>> q, k, v = torch.randn(4, 8, 64), torch.randn(4, 2, 64), torch.randn(4, 2, 64)
        >>> sequences.attend(q, k, v, scale=0.125).shape
        torch.Size([4, 8, 64])
    """

    positions: Tensor
    """(N,) int64: of each token, its place in its own sequence."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        lengths_B = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        starts_B = lengths_B.cumsum(0) - lengths_B
        self.num_tokens = int(lengths_B.sum())
        places = torch.arange(self.num_tokens, device="cpu") - starts_B.repeat_interleave(lengths_B)
        self.positions = places.to(device)
        self._groups = [_group_of(members, lengths_B, starts_B, device) for members in _choose_groups(lengths)]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Let each token attend to itself and the tokens before it in its own sequence, in float32 or as flash attention.

        Memory beside the result grows with the longest sequence, and at most with 16384 tokens if none is longer: never
        with its square.

        Args:
            q: (N, H, D).
            k: (N, h, D), where H is a multiple of h: query head i uses head i // (H / h).
            v: (N, h, Dv).
            scale: What products of q and k are multiplied by.
            window: Token i sees token j only if i - j < window.
            soft_cap: Turns scores s into soft_cap * tanh(s / soft_cap).

        Returns:
            (N, H, Dv) in q's dtype.

        Raises:
            ValueError: N is not the number of tokens, heads do not divide, or the window is empty.
        """
        if {len(q), len(k), len(v)} != {self.num_tokens} or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
            shapes = [list(tensor.shape) for tensor in (q, k, v)]
            raise ValueError(
                f"q, k and v are {shapes}; needed are {self.num_tokens} tokens and a multiple of k's heads"
            )
        if window is not None and window < 1:
            raise ValueError(f"window is {window}; a token sees at least itself")
        attended = q.new_empty((self.num_tokens, q.shape[1], v.shape[2]))
        for group in self._groups:
            batch = _attend_batch(group.gather(q), group.gather(k), group.gather(v), scale, window, soft_cap)
            group.scatter(batch, attended)
        return attended


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """Sequences that are one batch of attention, padded on the right to the longest.

    A token sees nothing after it, hence no padding. Padding repeats the last token of its own sequence: even times a
    weight of zero, NaN of another sequence would be seen.
    """

    batch_size: int
    length: int
    first_token: int
    tokens: Tensor | None
    """(batch_size * length,): which token fills each place; None if they follow `first_token` one by one."""
    real_places: Tensor | None
    """Places without the padding; None if there is none."""
    real_tokens: Tensor | None
    """The tokens that fill them: each token of the sequences once."""

    def gather(self, x_NHD: Tensor) -> Tensor:
        """(batch_size, H, length, D)."""
        if self.tokens is None:
            x_NHD = x_NHD.narrow(0, self.first_token, self.batch_size * self.length)
        else:
            x_NHD = x_NHD.index_select(0, self.tokens)
        return x_NHD.view(self.batch_size, self.length, *x_NHD.shape[1:]).transpose(1, 2)

    def scatter(self, x_BHLD: Tensor, out_NHD: Tensor) -> None:
        """Undo `gather`, padding dropped."""
        x_NHD = x_BHLD.transpose(1, 2).flatten(0, 1)
        if self.real_places is not None:
            x_NHD = x_NHD.index_select(0, self.real_places)
        if self.real_tokens is None:
            out_NHD.narrow(0, self.first_token, len(x_NHD)).copy_(x_NHD)
        else:
            out_NHD.index_copy_(0, self.real_tokens, x_NHD)


def _choose_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indexes of sequences that are padded to one length, the longest sequences first; empty ones are in no group."""
    groups: list[list[int]] = []
    longest = num_real = 0
    for index in sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index]):
        length = lengths[index]
        if groups:
            num_places = longest * (len(groups[-1]) + 1)
            if num_places <= _MAX_GROUP_TOKENS and num_real + length >= (1 - _MAX_PADDING) * num_places:
                groups[-1].append(index)
                num_real += length
                continue
        groups.append([index])
        longest = num_real = length
    return groups


def _group_of(members: list[int], lengths_B: Tensor, starts_B: Tensor, device: torch.device) -> _Group:
    lengths, starts = lengths_B[members, None], starts_B[members, None]
    length = int(lengths.max())
    places = torch.arange(length, device="cpu")
    tokens = (starts + places.minimum(lengths - 1)).flatten()
    is_real = (places < lengths).flatten()
    first_token = int(tokens[0])
    is_view = torch.equal(tokens, torch.arange(first_token, first_token + len(tokens), device="cpu"))
    return _Group(
        batch_size=len(members),
        length=length,
        first_token=first_token,
        tokens=None if is_view else tokens.to(device),
        real_places=None if is_real.all() else is_real.nonzero().flatten().to(device),
        real_tokens=None if is_view else tokens[is_real].to(device),
    )


def _attend_batch(
    q_BHLD: Tensor, k_BhLD: Tensor, v_BhLD: Tensor, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    length, head = q_BHLD.shape[2], max(q_BHLD.shape[3], v_BhLD.shape[3])
    # On CUDA torch would fall back to scores of all pairs at once.
    has_flash = not q_BHLD.is_cuda or (q_BHLD.element_size() == 2 and head <= _MAX_FLASH_HEAD)
    if not has_flash or soft_cap is not None or (window is not None and window < length):
        return _attend_in_chunks(q_BHLD, k_BhLD, v_BhLD, scale, window, soft_cap)
    # Flash attention has one size of head: zeros change no score, and are cut off the result.
    q, k, v = (pad(x, (0, head - x.shape[3])) if x.shape[3] < head else x for x in (q_BHLD, k_BhLD, v_BhLD))
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return attended[..., : v_BhLD.shape[3]]


def _attend_in_chunks(
    q_BHLD: Tensor, k_BhLD: Tensor, v_BhLD: Tensor, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    """The formula in float32, for as many queries at a time as their scores fit `_MAX_SCORES_BYTES`, at least one."""
    batch_size, num_heads, length, _ = q_BHLD.shape
    num_kv_heads = k_BhLD.shape[1]
    # Dense, or every product would copy its keys.
    k, v = k_BhLD.float().contiguous(), v_BhLD.float().contiguous()
    out_BHLD = q_BHLD.new_empty((batch_size, num_heads, length, v.shape[3]))
    chunk = max(1, _MAX_SCORES_BYTES // (4 * batch_size * num_heads * length))
    if window is not None:
        chunk = min(chunk, max(window, _MIN_CHUNK))  # most keys of a longer chunk are out of sight
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        first_key = 0 if window is None else max(0, start - window + 1)
        # Query heads of one key head are more queries of it: a product over broadcast heads would copy the keys.
        q = (q_BHLD[:, :, start:end].float() * scale).reshape(batch_size, num_kv_heads, -1, k.shape[3])
        scores = (q @ k[:, :, first_key:end].mT).view(batch_size, num_heads, end - start, -1)
        if soft_cap is not None:
            scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
        scores.masked_fill_(_is_hidden(start, end, first_key, window, scores.device), float("-inf"))
        weights = scores.softmax(-1).view(batch_size, num_kv_heads, -1, end - first_key)
        out_BHLD[:, :, start:end] = (weights @ v[:, :, first_key:end]).view(batch_size, num_heads, end - start, -1)
    return out_BHLD


def _is_hidden(start: int, end: int, first_key: int, window: int | None, device: torch.device) -> Tensor:
    """(end - start, end - first_key): whether a query does not see a key."""
    queries, keys = torch.arange(start, end, device=device), torch.arange(first_key, end, device=device)
    distance = queries[:, None] - keys
    return distance < 0 if window is None else (distance < 0) | (distance >= window)
