"""Plain causal attention over packed sequences in torch, for passes that must not touch an engine's KV cache.

Only the positions of the sequences, which are equal for every layer, are kept between calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_MAX_GROUP_TOKENS = 16384
"""Maximum tokens per attention batch, including padding; a longer sequence gets its own batch."""
_MAX_PADDING = 0.25
"""Largest share of padding in one batch."""
_MAX_SCORES_BYTES = 128 << 20
"""Limit for float32 scores at a time; their softmax needs as much again."""
_MIN_CHUNK = 256
_MAX_FLASH_HEAD = 256


class PackedSequences:
    """Sequences packed one after another into one batch of tokens.

    Args:
        lengths: Number of tokens of each sequence.
        device: The tokens' device.

    Examples:
        >>> sequences = PackedSequences([3, 1], torch.device("cpu"))
        >>> sequences.positions
        tensor([0, 1, 2, 0])
        >>> q, k, v = torch.randn(4, 8, 64), torch.randn(4, 2, 64), torch.randn(4, 2, 64)
        >>> sequences.attend(q, k, v, scale=0.125).shape
        torch.Size([4, 8, 64])
    """

    positions: Tensor
    """(N,) int64: each token's position in its sequence."""

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
        """Attend from each token to itself and earlier tokens of its sequence, in float32 or by flash attention.

        Extra memory grows linearly with the longest sequence or 16384 tokens, whichever is more, never quadratically.

        Args:
            q: (N, H, D).
            k: (N, h, D), where H is a multiple of h: query head i uses head i // (H / h).
            v: (N, h, Dv).
            scale: Factor of the products of q and k.
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
                f"q, k and v are {shapes}; they need {self.num_tokens} tokens, and q a multiple of k's heads"
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
    """One attention batch: sequences padded on the right to the longest.

    A token sees nothing after it, so it sees no padding. Padding repeats the sequence's own last token: NaN from
    another sequence would spread even with a weight of zero.
    """

    batch_size: int
    length: int
    first_token: int
    tokens: Tensor | None
    """(batch_size * length,): the token at each place; None if tokens follow `first_token` consecutively."""
    real_places: Tensor | None
    """Places that are not padding; None if there is no padding."""
    real_tokens: Tensor | None
    """The tokens at these places; each token occurs once."""

    def gather(self, x_NHD: Tensor) -> Tensor:
        """(batch_size, H, length, D)."""
        if self.tokens is None:
            x_NHD = x_NHD.narrow(0, self.first_token, self.batch_size * self.length)
        else:
            x_NHD = x_NHD.index_select(0, self.tokens)
        return x_NHD.view(self.batch_size, self.length, *x_NHD.shape[1:]).transpose(1, 2)

    def scatter(self, x_BHLD: Tensor, out_NHD: Tensor) -> None:
        """Undo `gather`, without the padding."""
        x_NHD = x_BHLD.transpose(1, 2).flatten(0, 1)
        if self.real_places is not None:
            x_NHD = x_NHD.index_select(0, self.real_places)
        if self.real_tokens is None:
            out_NHD.narrow(0, self.first_token, len(x_NHD)).copy_(x_NHD)
        else:
            out_NHD.index_copy_(0, self.real_tokens, x_NHD)


def _choose_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indexes of sequences to be padded together, longest first. Empty sequences are in no group."""
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
    # On CUDA, torch would otherwise compute the scores of all pairs at once.
    has_flash = not q_BHLD.is_cuda or (q_BHLD.element_size() == 2 and head <= _MAX_FLASH_HEAD)
    if not has_flash or soft_cap is not None or (window is not None and window < length):
        return _attend_in_chunks(q_BHLD, k_BhLD, v_BhLD, scale, window, soft_cap)
    # Flash attention needs equal head sizes: padding with zeros changes no score, and is cut off the result.
    q, k, v = (pad(x, (0, head - x.shape[3])) if x.shape[3] < head else x for x in (q_BHLD, k_BhLD, v_BhLD))
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return attended[..., : v_BhLD.shape[3]]


def _attend_in_chunks(
    q_BHLD: Tensor, k_BhLD: Tensor, v_BhLD: Tensor, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    """Attention in float32, for as many queries at a time as fit `_MAX_SCORES_BYTES`, at least one."""
    batch_size, num_heads, length, _ = q_BHLD.shape
    num_kv_heads = k_BhLD.shape[1]
    # Contiguous, or every product would copy the keys.
    k, v = k_BhLD.float().contiguous(), v_BhLD.float().contiguous()
    out_BHLD = q_BHLD.new_empty((batch_size, num_heads, length, v.shape[3]))
    chunk = max(1, _MAX_SCORES_BYTES // (4 * batch_size * num_heads * length))
    if window is not None:
        chunk = min(chunk, max(window, _MIN_CHUNK))  # in a longer chunk, most keys would be outside the window
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        first_key = 0 if window is None else max(0, start - window + 1)
        # Treat query heads that share a key head as more queries: a product over broadcast heads would copy the keys.
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
