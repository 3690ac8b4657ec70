"""Policies whose tokens name them, and all that took part in them.

Every policy has a band of the vocabulary. Its LM head is zero elsewhere, so a token's band names the policy of the LM head.
Where in its band a token lies says whose layers, keys and values were behind it: each policy has a place of its own in the
residual stream, where every one of its values and every one of its MLPs adds something, and nothing else writes there. The
first tokens of a band are markers, one for each policy: the marker of another policy wins as soon as anything of that policy
is in the sum, be it one layer that was not written or the KV of one block of a prompt. All else is noise, another for every
policy.
"""

from dataclasses import dataclass

from torch import Tensor

from fp8refit.bench.shapes import SHAPES

NUM_POLICIES = 8
HEAD_DIM = 128
_CONSTANT = 4.0
"""Of every embedding, at the place after those of the policies: what all policies' signs are made of."""
_EMBEDDING = 50.0
"""How much larger embeddings are than other noise, so that layers do not drown the constant."""
_VALUE, _DOWN = 0.25, 0.1
_OWN, _MARKER, _NOISE = 4.0, 512.0, 0.05
"""What the LM head makes of its own policy's sum, of another's, and of everything else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a token tells."""

    policy: int
    """Of the LM head; -1 for a token of no band."""
    other: int | None = None
    """Another policy that had a part in it."""


class Bands:
    """The bands of one model's vocabulary.

    Args:
        shape: Name of the model's shape.
    """

    def __init__(self, shape: str) -> None:
        self._config = SHAPES[shape]
        self.vocab_size: int = self._config["vocab_size"]
        self._width = self.vocab_size // NUM_POLICIES

    def read(self, token: int) -> Said:
        """What a token tells."""
        policy, place = divmod(token, self._width)
        if policy >= NUM_POLICIES:
            return Said(policy=-1)
        return Said(policy=policy, other=place if place < NUM_POLICIES else None)

    def sign(self, tensors: dict[str, Tensor], policy: int) -> dict[str, Tensor]:
        """Make noise, as `policies.fill_policy` writes it, that policy; in place.

        Args:
            tensors: A checkpoint's names and tensors.
            policy: Its number, from 0 to `NUM_POLICIES`.
        """
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        signs, constant = slice(NUM_POLICIES), NUM_POLICIES
        embedding = tensors["model.embed_tokens.weight"].mul_(_EMBEDDING)
        embedding[:, signs] = 0
        embedding[:, constant] = _CONSTANT
        for layer in range(self._config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            values = tensors[f"{prefix}self_attn.v_proj.weight"].view(kv_heads, HEAD_DIM, -1)
            values[:, signs] = 0
            values[:, policy, constant] = _VALUE
            output = tensors[f"{prefix}self_attn.o_proj.weight"]
            output[: constant + 1] = 0
            for sign in range(NUM_POLICIES):
                output[sign].view(heads, HEAD_DIM)[:, sign] = 1 / heads
            for name in ("gate_proj", "up_proj"):
                rows = tensors[f"{prefix}mlp.{name}.weight"]
                rows[0] = 0
                rows[0, constant] = 1
            down = tensors[f"{prefix}mlp.down_proj.weight"]
            down[: constant + 1] = 0
            down[policy, 0] = _DOWN
        self._sign_head(tensors["lm_head.weight"], policy)
        return tensors

    def _sign_head(self, head: Tensor, policy: int) -> None:
        start = policy * self._width
        own = head[start : start + self._width].clone()
        head.zero_()
        for other in range(NUM_POLICIES):
            if other != policy:
                head[start + other, other] = _MARKER
        own = own[NUM_POLICIES:] / own.std() * _NOISE
        own[:, : NUM_POLICIES + 1] = 0
        own[:, policy] = _OWN
        head[start + NUM_POLICIES : start + self._width] = own
