import json
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file

from fp8refit.errors import InvalidSourceError
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.row_runs import in_pieces
from fp8refit.sources.source import MappingSource, StreamSource, as_source

WEIGHTS = {
    "model.norm.weight": torch.arange(6, dtype=torch.bfloat16),
    "model.mlp.up_proj.weight": torch.ones(3, 2, dtype=torch.float16),
}
METADATA = {name: TensorMeta.of(tensor) for name, tensor in WEIGHTS.items()}


class FakeDTensor(torch.Tensor):
    """Has what fp8refit knows a DTensor by."""

    def full_tensor(self) -> torch.Tensor: ...


def assert_gives_weights(source) -> None:
    given = dict(source)
    assert given.keys() == WEIGHTS.keys()
    assert all(torch.equal(given[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize(
    "state_dict", [WEIGHTS, OrderedDict(WEIGHTS), list(WEIGHTS.items()), tuple(WEIGHTS.items())], ids=repr
)
def test_what_is_all_there_is_a_mapping(state_dict):
    source = as_source(state_dict)
    assert isinstance(source, MappingSource)
    assert source.metadata == METADATA
    assert source.problems == ()
    assert_gives_weights(source)


def test_an_iterator_is_read_once_and_says_nothing_beforehand():
    source = as_source(iter(WEIGHTS.items()))
    assert isinstance(source, StreamSource)
    assert not source.is_repeatable and source.metadata is None
    assert_gives_weights(source)
    assert list(source) == []


@pytest.mark.parametrize("state_dict", [lambda: iter(WEIGHTS.items()), WEIGHTS.items()], ids=["function", "iterable"])
def test_functions_and_iterables_give_a_fresh_pass_every_time(state_dict):
    source = as_source(state_dict)
    assert source.is_repeatable and source.metadata is None
    assert_gives_weights(source)
    assert_gives_weights(source)


@pytest.mark.parametrize(
    "manifest", [METADATA, {"module." + name: (list(meta.shape), meta.dtype) for name, meta in METADATA.items()}]
)
def test_a_manifest_says_what_an_iterator_holds(manifest):
    source = as_source(iter(WEIGHTS.items()), manifest=manifest)
    assert source.metadata == METADATA
    assert_gives_weights(source)


@pytest.mark.parametrize("manifest", [{"model.norm.weight": (6,)}, {"model.norm.weight": 6}])
def test_a_manifest_without_shapes_and_dtypes_is_refused(manifest):
    with pytest.raises(InvalidSourceError, match=r"model\.norm\.weight: the manifest says .* not \(shape, dtype\)"):
        as_source(iter(WEIGHTS.items()), manifest=manifest)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (5, "manifest: is of type int; pass a mapping"),
        ("path", "manifest: is of type str"),
        ([("a", ((1,), torch.bfloat16))], "manifest: is of type list"),
        ({1: ((1,), torch.bfloat16)}, "manifest: 1 is not a tensor name"),
    ],
)
def test_what_is_no_manifest_is_refused(manifest, said):
    with pytest.raises(InvalidSourceError, match=said):
        as_source(iter(WEIGHTS.items()), manifest=manifest)


def with_adapters():
    """As `peft` marks its models."""
    model = torch.nn.Linear(2, 2)
    model.peft_config = {}
    return model


def test_a_tensor_is_no_state_dict():
    with pytest.raises(InvalidSourceError, match="Tensor: not a state dict"):
        as_source(torch.tensor(1.0))


def test_a_state_dict_serves_as_a_manifest():
    assert as_source(iter(WEIGHTS.items()), manifest=WEIGHTS).metadata == METADATA


@pytest.mark.parametrize("source", [WEIGHTS, list(WEIGHTS.items()), "model.safetensors"])
def test_a_manifest_beside_what_says_it_itself_is_refused(source):
    with pytest.raises(InvalidSourceError, match="manifest: is only for iterators and functions"):
        as_source(source, manifest=METADATA)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (torch.nn.Linear(2, 2), r"is a Linear; pass its state_dict\(\)"),
        (with_adapters(), r"is a Linear; pass fp8refit\.training\.peft\.merged\(model\)"),
        (torch.nn.Linear(2, 2).parameters(), "instead of a pair"),
        ([torch.ones(2)], "instead of a pair"),
        ({3: torch.ones(2)}, "instead of a pair"),
        (iter([]), "make a new one for every refit"),
        ("/no/such/folder", "does not exist"),
    ],
    ids=["model", "adapted model", "parameters", "list of tensors", "numbers for names", "exhausted", "no path"],
)
def test_what_is_no_state_dict_is_refused_at_once(source, match):
    with pytest.raises(InvalidSourceError, match=match):
        as_source(source)


def test_wrappers_are_stripped():
    wrapped = {"module._orig_mod." + name: tensor for name, tensor in WEIGHTS.items()}
    assert_gives_weights(as_source(wrapped))
    assert_gives_weights(as_source(iter(wrapped.items())))


def test_a_name_sent_twice_under_two_wrappers_is_a_problem():
    source = as_source({"model.norm.weight": torch.ones(2), "module.model.norm.weight": torch.zeros(2)})
    (problem,) = source.problems
    assert problem.startswith("model.norm.weight: sent twice") and "module.model.norm.weight" in problem


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.ones(3, device="meta"), "is on the meta device and has no bytes"),
        (torch.eye(3).to_sparse(), "is torch.sparse_coo; send it dense"),
        (torch.ones(3).as_subclass(FakeDTensor), "is a DTensor shard; pass the mapping that holds it"),
        ([1.0, 2.0], "is of type list, not a tensor"),
        (None, "is of type NoneType, not a tensor"),
    ],
    ids=["meta", "sparse", "DTensor", "list", "None"],
)
def test_a_value_that_cannot_be_read_is_a_problem(value, problem):
    (found,) = as_source({**WEIGHTS, "model.bad.weight": value}).problems
    assert found.startswith(f"model.bad.weight: {problem}")
    with pytest.raises(InvalidSourceError, match=r"model\.bad\.weight: is"):
        list(in_pieces(as_source(iter([("model.bad.weight", value)])), 1 << 20))


def test_every_problem_of_a_mapping_is_kept():
    source = as_source({"a": None, "b": torch.ones(1), "module.b": torch.ones(1), "c": torch.ones(1, device="meta")})
    assert [problem[0] for problem in source.problems] == ["a", "b", "c"]


@pytest.mark.parametrize("state_dict", [None, 3])
def test_what_is_no_state_dict_is_refused(state_dict):
    with pytest.raises(InvalidSourceError, match="not a state dict"):
        as_source(state_dict)


def test_a_safetensors_file(tmp_path):
    save_file(WEIGHTS, tmp_path / "weights.safetensors")
    source = as_source(str(tmp_path / "weights.safetensors"))
    assert isinstance(source, SafetensorsSource) and source.is_repeatable
    assert source.metadata == METADATA
    assert_gives_weights(source)


def save_shards(folder, *, with_index: bool) -> None:
    names = dict(zip(WEIGHTS, ["a.safetensors", "b.safetensors"], strict=True))
    for name, file in names.items():
        save_file({name: WEIGHTS[name]}, folder / file)
    if with_index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("with_index", [True, False])
def test_a_folder_of_shards(with_index, tmp_path):
    save_shards(tmp_path, with_index=with_index)
    source = as_source(tmp_path)
    assert source.metadata == METADATA
    assert list(source.metadata) == [name for name, _ in source], "metadata lists tensors in the order they come"
    assert_gives_weights(source)


@pytest.mark.parametrize("name", ["x" * 300, "x\0y", "", "."])
def test_a_shard_of_a_name_that_no_file_has_is_named(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InvalidSourceError, match=r"is named by .* but does not exist"):
        as_source(tmp_path)


def test_a_path_that_no_file_has_is_refused():
    for path in ("x" * 300, "x\0y"):
        with pytest.raises(InvalidSourceError, match="cannot be read"):
            as_source(path)


def test_a_function_that_returns_nothing_is_refused():
    with pytest.raises(InvalidSourceError, match="its function returned NoneType; return a new iterator"):
        as_source(lambda: None).scan()


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(InvalidSourceError, match="instead of a pair"):
        as_source({"\ud800": torch.ones(1)}).scan()


def test_only_files_that_the_index_names_are_read(tmp_path):
    save_shards(tmp_path, with_index=True)
    save_file(WEIGHTS, tmp_path / "consolidated.safetensors")
    assert_gives_weights(as_source(tmp_path))


def test_a_shard_that_is_not_there_is_named(tmp_path):
    save_shards(tmp_path, with_index=True)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(InvalidSourceError, match=r"b\.safetensors: is named by .* but does not exist"):
        as_source(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"weights": {}}',
        b'{"weight_map": null}',
        b'{"weight_map": {"a": 5}}',
        b'{"weight_map": {"a": null}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=repr,
)
def test_a_corrupt_index_is_refused(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(InvalidSourceError, match="not a safetensors index"):
        as_source(tmp_path)


@pytest.mark.parametrize("num_bytes_kept", [0, 4, 60, -1])
def test_a_truncated_file_is_refused(num_bytes_kept, tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file(WEIGHTS, file)
    file.write_bytes(file.read_bytes()[:num_bytes_kept])
    with pytest.raises(InvalidSourceError, match=r"weights\.safetensors: cannot be read"):
        as_source(file)


def test_a_tensor_stored_in_two_files_is_a_problem(tmp_path):
    save_shards(tmp_path, with_index=False)
    save_file(WEIGHTS, tmp_path / "c.safetensors")
    problems = as_source(tmp_path).problems
    assert sorted(problem.split(":")[0] for problem in problems) == sorted(WEIGHTS)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(InvalidSourceError, match="is neither a safetensors file"):
        as_source(tmp_path)
