"""Merged LoRA: every weight against the library's own merge, on models that it made."""

import copy
import gc
import weakref
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8refit import RefitReport
from fp8refit.errors import InvalidSourceError
from fp8refit.fill.ties import untied
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.recipe_batches import ScratchBuffer, in_batches
from fp8refit.sources.row_runs import Piece
from fp8refit.training.peft import merged
from tests.fake_ranks import ClientEntryPoint, Cluster, Drivers, Remote

peft = pytest.importorskip("peft")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(48, 96), nn.Linear(96, 48, bias=False)
        self.norm = nn.LayerNorm(48)

    def forward(self, x):
        return self.norm(self.down_proj(self.up_proj(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(20, 48)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(48, 20, bias=False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("unsaved", torch.arange(4.0), persistent=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def adapted(dtype=torch.float32, **options):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=24, target_modules=["up_proj", "down_proj", "embed_tokens"], **options)
    model = peft.get_peft_model(Network().to(dtype), config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def own_merge(model):
    return copy.deepcopy(model).merge_and_unload().state_dict()


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype is expected[name].dtype
        step = torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(tensor, expected[name], rtol=2 * step, atol=2 * step, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}])
def test_every_weight_is_that_of_the_librarys_own_merge(dtype, options):
    model = adapted(dtype, **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert_close(dict(merged(model)), own_merge(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float32])
def test_products_are_rounded_once(low_dtype):
    """Adapters are of fp32 by the library's own default, and are not rounded to the dtype of the weight."""
    model = adapted(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape).mul(0.1).to(low_dtype)
    layer = model.base_model.model.layers[0].up_proj
    down, up = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = layer.base_layer.weight.double() + 3.0 * (up @ down)
    found = dict(merged(model))["layers.0.up_proj.weight"]
    assert (found != exact.to(torch.bfloat16)).double().mean() < 0.001
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8).all()


def test_several_adapters_none_and_some_that_are_merged_already():
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["up_proj"]))
    for name, parameter in model.named_parameters():
        if "second" in name:
            nn.init.normal_(parameter, std=0.1)
    with_first = own_merge(model)
    model.base_model.set_adapter(["default", "second"])
    both = dict(merged(model))
    assert not torch.equal(both["layers.0.up_proj.weight"], with_first["layers.0.up_proj.weight"])
    assert_close(both, own_merge(model))
    with model.disable_adapter():
        torch.manual_seed(0)
        assert_close(dict(merged(model)), Network().state_dict())
    model.merge_adapter(["default"])
    assert_close(dict(merged(model)), dict(both.items()))


def test_an_adapter_with_a_bias_is_refused_by_name():
    model = adapted()
    layer = model.base_model.model.layers[0].up_proj
    layer.lora_bias["default"] = True
    with pytest.raises(InvalidSourceError) as caught:
        merged(model)
    [problem] = caught.value.problems
    assert problem.startswith("base_model.model.layers.0.up_proj: ") and "has an adapter with a bias" in problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_bytes", [3000, 1 << 20])
def test_dora_is_merged_as_the_library_does_and_changes_nothing(dtype, max_bytes):
    model = adapted(dtype, use_dora=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = own_merge(model)
    assert_close(dict(merged(model)), expected)
    for piece in merged(model).pieces(max_bytes):
        rows = expected[piece.name]
        rows = rows[piece.first_row : piece.end_row] if piece.full_shape else rows
        assert_close({"": piece.tensor}, {"": rows})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_adapter_that_is_no_product_is_refused_by_name_and_the_remedy_works():
    """DoRA beside another adapter: each is computed of what the one before made of the whole weight."""
    model = adapted(use_dora=True)
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["up_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(InvalidSourceError) as caught:
        merged(model)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        name for name in dict(model.named_modules()) if name.endswith("up_proj")
    ]
    remedy = "call model.merge_adapter(), refit(merged(model)), and model.unmerge_adapter()"
    assert all(problem.endswith(remedy) for problem in caught.value.problems)
    model.merge_adapter()
    found = dict(merged(model))
    model.unmerge_adapter()
    assert_close(found, own_merge(model))


def test_a_model_without_adapters_is_what_it_is():
    model = Network()
    found = dict(merged(model))
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.items())


def test_a_tensor_that_is_given_whole_is_the_readers_own():
    alive = []
    for name, tensor in merged(adapted()):
        if name.endswith("proj.weight"):
            assert all(each() is None for each in alive)
            alive.append(weakref.ref(tensor))
        del tensor
    assert len(alive) == 4


@pytest.mark.parametrize("shares_launches", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_bytes", [1, 3000, 30_000, 1 << 20])
def test_pieces_are_rows_of_the_same_weights(max_bytes, dtype, shares_launches, monkeypatch):
    monkeypatch.setattr("fp8refit.sources.recipe_batches._shares_launches", lambda device: shares_launches)
    model = adapted(dtype, modules_to_save=["lm_head"])
    source, found = merged(model), {}
    for piece in source.pieces(max_bytes):
        rows = found.setdefault(piece.name, torch.full(piece.full_shape, torch.nan, dtype=piece.tensor.dtype))
        if piece.full_shape:
            rows = rows[piece.first_row : piece.end_row]
        rows.copy_(piece.tensor)
    assert_close(found, dict(source))
    metadata, problems = source.scan()
    assert {name: (meta.shape, meta.dtype) for name, meta in metadata.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()
    }
    assert problems == ()


def test_a_gpu_merges_as_many_at_once_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr("fp8refit.sources.recipe_batches._shares_launches", lambda device: True)
    source, made = merged(adapted()), []
    make = source.make
    monkeypatch.setattr(source, "make", lambda recipes, outs: made.append(len(recipes)) or make(recipes, outs))
    names = [name for name, _ in source]
    made.clear()
    assert [piece.name for piece in source.pieces(1 << 20)] == names
    assert [number for number in made if number] == [5]
    made.clear()
    assert {piece.name for piece in source.pieces(40_000)} == set(names)
    assert [number for number in made if number] == [2, 2, 1]


@pytest.mark.parametrize("shares_launches", [False, True])
@pytest.mark.parametrize("max_bytes", [3000, 40_000, 1 << 20])
def test_a_batch_stays_valid_until_the_next_one(max_bytes, shares_launches, monkeypatch):
    monkeypatch.setattr("fp8refit.sources.recipe_batches._shares_launches", lambda device: shares_launches)
    model = adapted()
    source, given = merged(model), []
    expected = dict(source)
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for batch in in_batches(source, source.recipes(max_bytes), ScratchBuffer(max_bytes)):
        made = 0
        for each in batch:
            name, tensor, first = each.name, each.tensor, each.first_row
            assert each.is_whole == (tensor.shape == expected[name].shape)
            assert_close({name: tensor}, {name: expected[name][first : first + len(tensor)]})
            made += tensor.nbytes if name.endswith(("proj.weight", "tokens.weight")) else 0
            given.append(name)
        assert made <= max(max_bytes, 128 * 96 * 4)
    assert list(dict.fromkeys(given)) == list(expected)
    assert own == {tensor.data_ptr() for tensor in model.state_dict().values()}


def test_what_was_scanned_is_scanned_again_only_if_it_is_another():
    model = adapted()
    first = merged(model).scan()[0]
    nn.init.normal_(model.base_model.model.lm_head.weight)
    assert merged(model).scan()[0] is first, "the weights are laid out as they were"
    model.base_model.model.lm_head.weight.data = torch.zeros(21, 48)
    assert merged(model).scan()[0] == first | {"lm_head.weight": TensorMeta(shape=(21, 48), dtype=torch.float32)}
    model.base_model.model.lm_head.to(torch.bfloat16)
    assert merged(model).scan()[0]["lm_head.weight"].dtype is torch.bfloat16
    model.base_model.model.lm_head.weight.untyped_storage().resize_(0)
    metadata, problems = merged(model).scan()
    assert "lm_head.weight" not in metadata and len(problems) == 1
    model.base_model.model.register_buffer("table", None)
    assert "table" not in merged(model).scan()[0]


def test_a_model_that_was_scanned_is_let_go():
    model = adapted()
    merged(model).scan()
    alive = [weakref.ref(model), weakref.ref(model.base_model.model.lm_head.weight)]
    del model
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_recipes_are_made_in_the_readers_memory():
    source = merged(adapted(torch.bfloat16))
    expected, recipes = dict(source), []
    for each in source.recipes(3000):
        if isinstance(each, Piece):
            rows = expected[each.name]
            rows = rows[each.first_row : each.end_row] if each.full_shape else rows
            assert torch.equal(each.tensor, rows)
        else:
            recipes.append(each)
    outs = [torch.full_like(each.tensor, torch.nan) for each in recipes]
    source.make(recipes, outs)
    for each, out in zip(recipes, outs, strict=True):
        assert_close({"rows": out}, {"rows": expected[each.name][each.first_row :][: len(out)]})


class Taken(TorchDispatchMode):
    """How much memory is taken while it is entered."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {id(each) for each in args if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and id(result) not in before and not func.is_view
        if is_new and result is not (kwargs or {}).get("out"):
            self.num_bytes += result.nbytes
        return result


def test_a_pass_takes_one_buffer_and_no_copy_of_a_weight():
    source = merged(adapted())
    largest = max(tensor.nbytes for _, tensor in source)
    with Taken() as taken:
        assert sum(piece.tensor.nbytes for piece in source.pieces(1 << 20)) > 4 * largest
    assert largest <= taken.num_bytes < 1.5 * largest
    with Taken() as taken:
        for _ in source:
            pass
    assert taken.num_bytes > 2 * largest, "to iterate takes memory for every tensor"


def network_of(policy):
    """Modules by the names of a policy's weights."""
    root = nn.Module()
    for name, tensor in policy.items():
        *path, leaf, key = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        is_matrix = leaf.endswith("_proj")
        child = nn.Linear(*reversed(tensor.shape), bias=False) if is_matrix else module._modules.get(leaf, nn.Module())
        child.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        module.add_module(leaf, child)
    root.forward = lambda x: x
    return root


@pytest.mark.parametrize("place", ["in this process", "elsewhere"])
def test_an_engine_holds_the_merged_policy(place, monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])
    cluster = Cluster("replicated")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "up_proj"])
    for version in (1, 2):
        model = peft.get_peft_model(network_of(cluster.make_policy(version)), config, autocast_adapter_dtype=False)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.5)
        if place == "elsewhere":
            Remote(cluster, bucket_bytes=1 << 20).refitter.refit(merged(model))
        else:
            assert {type(each) for each in Drivers(cluster).refit({"state_dict": merged(model)})} == {RefitReport}
        cluster.assert_holds(dict(merged(model)), version=version)


def test_a_weight_without_bytes_is_named():
    model = adapted()
    model.base_model.model.lm_head.to("meta")
    metadata, problems = merged(model).scan()
    assert "lm_head.weight" not in metadata
    assert [problem.split(":")[0] for problem in problems] == ["lm_head.weight"]


def matrix_of(model, kind):
    return getattr(model.base_model.model.layers[1].up_proj, f"lora_{kind}")["default"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda model: matrix_of(model, "A").to("meta"), "a matrix of its adapter is on the meta device"),
        (
            lambda model: matrix_of(model, "B").weight.untyped_storage().resize_(0),
            "a matrix of its adapter reads more than the 0 bytes of its storage",
        ),
        (
            lambda model: matrix_of(model, "B").register_parameter("weight", nn.Parameter(torch.ones(95, 8))),
            "do not fit",
        ),
        (
            lambda model: matrix_of(model, "A").register_parameter("weight", nn.Parameter(torch.ones(7, 48))),
            "do not fit",
        ),
    ],
    ids=["meta", "freed", "rows", "rank"],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_an_adapter_that_cannot_be_added_is_named_before_anything_is_read(is_known, spoil, why):
    model = adapted()
    if is_known:
        assert merged(model).scan()[1] == ()
    spoil(model)
    _, problems = merged(model).scan()
    assert [problem.split(": ")[0] for problem in problems] == ["layers.1.up_proj.weight"]
    assert why in problems[0]


class Stack(nn.Module):
    """Experts in one parameter, which has no layer of its own."""

    def __init__(self):
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(4, 32, 16)), nn.Parameter(torch.randn(4, 16, 32))

    def forward(self, x):
        return x


@pytest.mark.parametrize("max_bytes", [4096, 1 << 20])
def test_adapters_of_parameters_are_merged(max_bytes):
    """`target_parameters`: of the parameter that they name, not of one called `weight`."""
    torch.manual_seed(0)
    network = nn.Sequential(Stack())
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["0.gate_up_proj"])
    model = peft.get_peft_model(network, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    expected = own_merge(model)
    assert_close(dict(merged(model)), expected)
    for piece in merged(model).pieces(max_bytes):
        assert_close({"": piece.tensor}, {"": expected[piece.name][piece.first_row : piece.end_row]})


TIED = ("lm_head.weight", "embed_tokens.weight")


def tied(dtype=torch.float32, *, autocasts=False, **options):
    network = Network().to(dtype)
    network.lm_head.weight = network.embed_tokens.weight
    network._tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}
    network.get_input_embeddings = lambda: network.embed_tokens
    network.config = {"tie_word_embeddings": True}
    model = peft.get_peft_model(network, peft.LoraConfig(r=4, **options), autocast_adapter_dtype=autocasts)
    for name, parameter in model.named_parameters():
        if "lora_" in name and not autocasts:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_adapters_of_one_of_two_tied_weights_are_refused(targets):
    with pytest.raises(InvalidSourceError, match=r"lm_head.*is tied to embed_tokens.*their adapters differ"):
        merged(tied(target_modules=targets))
    assert {*TIED} <= {name for name, _ in merged(tied(target_modules=["up_proj"]))}


def test_tied_weights_with_the_same_adapter_stay_tied():
    model = tied(target_modules=["embed_tokens"], ensure_weight_tying=True)
    found, layer = dict(merged(model)), model.base_model.model.embed_tokens
    expected = (layer.base_layer.weight + layer.get_delta_weight("default")).detach()
    assert_close({name: found[name] for name in TIED}, dict.fromkeys(TIED, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_an_adapter_that_the_library_makes_is_taken_until_it_is_trained(dtype):
    """Where it casts adapters, as is its default, it makes two of one."""
    model = tied(dtype, autocasts=True, target_modules=["embed_tokens"], ensure_weight_tying=True)
    found = dict(merged(model))
    assert torch.equal(*(found[name] for name in TIED))
    with torch.no_grad():
        model.base_model.model.lm_head.lora_B["default"].weight.add_(0.1)
    if dtype is torch.bfloat16:
        with pytest.raises(InvalidSourceError, match=r"autocast_adapter_dtype=False\), else peft gives them copies"):
            merged(model)
    else:
        merged(model)


def test_a_head_that_was_trained_beside_its_tied_embedding_is_not_taken_for_it():
    model = tied(target_modules=["up_proj"], modules_to_save=["lm_head"])
    head, embed = TIED
    ties = {head: (embed, torch.bfloat16)}
    source = merged(model)
    assert untied(ties, source) == []
    values = source.pick([head])[head]
    with torch.no_grad():
        values[0, 0] += 1
    (problem,) = untied(ties, source)
    assert problem.startswith(f"{head}: is tied, and differs")
    assert "tie_word_embeddings=false" in problem


def test_the_refusal_of_a_state_dict_with_adapters_names_what_works(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])
    cluster = Cluster("alone")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    model = peft.get_peft_model(network_of(cluster.make_policy(1)), config)
    refitter = Remote(cluster).refitter
    with pytest.raises(InvalidSourceError) as caught:
        refitter.refit(model.state_dict())
    said = str(caught.value)
    assert "send fp8refit.training.peft.merged(model)" in said and "merge_and_unload" not in said
    module, _, function = "fp8refit.training.peft.merged".rpartition(".")
    refitter.refit(getattr(import_module(module), function)(model))
    cluster.assert_holds(dict(merged(model)), version=1)


def test_an_adapter_that_is_no_lora_is_merged_by_the_library_as_told():
    torch.manual_seed(0)
    config = peft.IA3Config(target_modules=["up_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = peft.get_peft_model(Network().to(torch.bfloat16), config)
    for name, parameter in model.named_parameters():
        if "ia3_" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
    told = r"is adapted by peft\.tuners\.ia3\.layer\.Linear, which is no LoRA; call model\.merge_adapter"
    with pytest.raises(InvalidSourceError, match=told):
        merged(model)
    expected = own_merge(model)
    model.merge_adapter()
    found = dict(merged(model))
    model.unmerge_adapter()
    assert_close(found, expected)
