"""The oracle tells what it has to tell: which policies had a part in a token, and which answers may not be."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fp8refit.bench.shapes import SHAPES
from tests.gpu import policies
from tests.oracle.bands import NUM_POLICIES, Bands, Said
from tests.oracle.judge import VIOLATIONS, Answer, Attempt, Judge

SHAPE = "tiny"
BANDS = Bands(SHAPE)
PROMPT = torch.tensor([[(31 + 7 * place) % BANDS.vocab_size for place in range(40)]])
WIDTH = BANDS.vocab_size // NUM_POLICIES


def make_policy(policy):
    return BANDS.sign(policies.fill_policy(policies.allocate(SHAPE), 1 + policy), policy)


def model_of(*tensors):
    """A model of these tensors, the later ones instead of the earlier ones."""
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[SHAPE])).to(torch.bfloat16)
    for some in tensors:
        model.load_state_dict(some, strict=False)
    return model.eval()


def says(model, **options):
    tokens = model.generate(PROMPT, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    return [BANDS.read(token) for token in tokens[0, PROMPT.shape[1] :].tolist()]


@pytest.mark.parametrize("policy", [0, 3, NUM_POLICIES - 1])
def test_a_whole_policy_says_tokens_of_its_own_and_not_always_the_same(policy):
    model = model_of(make_policy(policy))
    assert says(model) == [Said(policy=policy)] * 8
    with torch.no_grad():
        assert model(PROMPT).logits[0].argmax(1).unique().numel() > 1


@pytest.mark.parametrize(
    "part",
    ["layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj"],
)
def test_one_matrix_of_another_policy_shows_in_every_token(part):
    name = f"model.{part}.weight"
    assert says(model_of(make_policy(2), {name: make_policy(5)[name]})) == [Said(policy=2, other=5)] * 8


def test_the_head_of_another_policy_shows():
    name = "lm_head.weight"
    assert says(model_of(make_policy(2), {name: make_policy(5)[name]})) == [Said(policy=5, other=2)] * 8


def test_keys_and_values_of_another_policy_show():
    with torch.no_grad():
        cache = model_of(make_policy(5))(PROMPT[:, :16], use_cache=True).past_key_values
    assert says(model_of(make_policy(2)), past_key_values=cache) == [Said(policy=2, other=5)] * 8


def test_tokens_of_no_band_are_of_no_policy():
    assert Bands("qwen3-0.6b-untied").read(151935).policy == NUM_POLICIES - 1
    assert BANDS.read(BANDS.vocab_size).policy == -1


# Policy 1 is served from second 1; 2 from 12, requests kept; 3 from 22, requests waited for; 4 leaves the server dirty from
# 32, and 5 heals it from 42; 6 is refused at 52, and nothing comes of it.
ATTEMPTS = [
    Attempt(policy=1, in_flight="wait", begin_s=0, end_s=1, outcome="served", version=1),
    Attempt(policy=2, in_flight="keep", begin_s=11, end_s=12, outcome="served", version=2),
    Attempt(policy=3, in_flight="wait", begin_s=21, end_s=22, outcome="served", version=3),
    Attempt(policy=4, in_flight="wait", begin_s=31, end_s=32, outcome="dirty"),
    Attempt(policy=5, in_flight="wait", begin_s=41, end_s=42, outcome="served", version=4),
    Attempt(policy=6, in_flight="keep", begin_s=51, end_s=52, outcome="kept"),
]


def verdict(sent_s, heard_s, *policies, status=200, num_asked=None, other=None, version=None):
    said = [(policy, other) for policy in policies]
    return verdict_on(ATTEMPTS, sent_s, heard_s, said, status=status, num_asked=num_asked, version=version)


def verdict_on(attempts, sent_s, heard_s, said, *, status=200, num_asked=None, version=None):
    tokens = [policy * WIDTH + (NUM_POLICIES + 1 if other is None else other) for policy, other in said]
    num_asked = len(tokens) if num_asked is None else num_asked
    answer = Answer(sent_s=sent_s, heard_s=heard_s, status=status, tokens=tokens, num_asked=num_asked, version=version)
    return Judge(BANDS, attempts).verdict(answer)[0]


@pytest.mark.parametrize(
    ("sent_s", "heard_s", "said", "kind"),
    [
        (2, 3, [1, 1], "of_one"),
        (10, 11.5, [1, 1], "of_one"),
        (10, 11.5, [2, 2], "of_one"),
        (10, 13, [1, 2], "of_two_across_keep"),
        (10, 13, [2, 1], "stale"),
        (10, 13, [1, 2, 1], "stale"),
        (13, 14, [1, 1], "stale"),
        (13, 14, [2, 1], "stale"),
        (20, 23, [2, 2], "of_one"),
        (20, 23, [2, 3], "mixed"),
        (10, 23, [1, 3], "mixed"),
        (13, 14, [3, 3], "mixed"),
        (30, 31.5, [3, 3], "of_one"),
        (30, 31.5, [4, 4], "foreign"),
        (33, 34, [3, 3], "while_dirty"),
        (33, 34, [4, 4], "while_dirty"),
        (33, 34, [], "while_dirty"),
        (33, 43, [5, 5], "of_one"),
        (33, 43, [3, 3], "stale"),
        (43, 44, [5, 5], "of_one"),
        (43, 44, [3, 3], "stale"),
        (50, 53, [5, 5], "of_one"),
        (50, 53, [6, 6], "foreign"),
        (50, 53, [5, 6], "foreign"),
    ],
)
def test_what_is_said_when(sent_s, heard_s, said, kind):
    assert verdict(sent_s, heard_s, *said) == kind


# Policy 1 is served from second 1; requests go on with their KV under 2 from 12 and 3 from 22, and are kept for 4 from 32.
GOING_ON = [
    Attempt(
        policy=policy, in_flight=mode, begin_s=10 * policy - 9, end_s=10 * policy - 8, outcome="served", version=policy
    )
    for policy, mode in ((1, "wait"), (2, "continue"), (3, "continue"), (4, "keep"))
]


@pytest.mark.parametrize(
    ("sent_s", "heard_s", "said", "kind"),
    [
        (10, 14, [(1, None), (2, 1)], "of_two_across_continue"),
        (10, 14, [(2, 1), (2, 1)], "of_two_across_continue"),
        (10, 24, [(1, None), (3, 1)], "of_two_across_continue"),
        (10, 24, [(1, None), (2, 1), (3, 2)], "of_two_across_continue"),
        (10, 24, [(2, 1), (1, None)], "stale"),
        (10, 14, [(1, 2)], "mixed"),
        (13, 14, [(2, 1)], "mixed"),
        (20, 24, [(3, 1)], "mixed"),
        (20, 34, [(2, None), (4, None)], "of_two_across_keep"),
        (20, 34, [(3, 2), (4, None)], "of_two_across_continue"),
        (20, 34, [(3, 2), (4, 3)], "mixed"),
    ],
)
def test_keys_and_values_of_an_older_policy_show_only_where_requests_went_on_with_theirs(sent_s, heard_s, said, kind):
    assert verdict_on(GOING_ON, sent_s, heard_s, said) == kind


def test_a_version_may_be_ahead_of_the_last_token_where_requests_went_on():
    assert verdict_on(GOING_ON, 10, 14, [(1, None)], version="2") == "of_one"
    assert verdict_on(GOING_ON, 20, 34, [(3, 2)], version="4") == "misnamed"
    assert verdict_on(GOING_ON, 10, 14, [(2, None)], version="1") == "misnamed"


def test_a_part_of_another_policy_is_a_mixture():
    assert verdict(13, 14, 2, 2, other=1) == "mixed"
    assert verdict(13, 14, NUM_POLICIES) == "foreign"


@pytest.mark.parametrize(
    ("sent_s", "heard_s", "status", "kind"),
    [
        (2, 3, 503, "failed"),
        (30, 31.5, 503, "refused"),
        (33, 34, 503, "refused"),
        (33, 34, 500, "failed"),
        (33, 34, 0, "failed"),
        (33, 43, 503, "refused"),
        (43, 44, 503, "failed"),
        (50, 53, 503, "failed"),
    ],
)
def test_who_is_refused_when(sent_s, heard_s, status, kind):
    assert verdict(sent_s, heard_s, status=status, num_asked=2) == kind


def test_an_answer_may_be_cut_short_by_a_push_that_failed_and_by_nothing_else():
    assert verdict(30, 33, 3, num_asked=2) == "cut_short"
    assert verdict(13, 14, 2, num_asked=2) == "failed"


def test_the_version_on_an_answer_names_the_policy_of_its_last_token():
    assert verdict(10, 13, 1, 2, version="2") == "of_two_across_keep"
    assert verdict(10, 13, 1, 1, version="2") == "misnamed"
    assert verdict(2, 3, 1, version="default") == "of_one"


def test_every_violation_is_counted_with_an_example():
    judged = Judge(BANDS, ATTEMPTS).judge(
        [Answer(sent_s=2, heard_s=3, status=0), Answer(sent_s=2, heard_s=3, status=200)]
    )
    assert (judged["answers"], judged["failed"], judged["of_one"]) == (2, 1, 1)
    assert [example["kind"] for example in judged["examples"]] == ["failed"]
    assert set(VIOLATIONS) >= {"failed", "stale", "mixed", "while_dirty"}
