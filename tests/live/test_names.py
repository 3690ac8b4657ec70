import pytest

from fp8refit.live.names import in_one, is_not_a_weight, strip_wrappers, without_numbers


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        (
            "module._orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        ("model.layers.0._checkpoint_wrapped_module.norm.weight", "model.layers.0.norm.weight"),
        ("model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.norm.weight", "model.layers.0.norm.weight"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("model.layers.0.self_attn.q_proj.base_layer.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("module.base_model.model.lm_head.weight", "lm_head.weight"),
        ("model.submodule.weight", "model.submodule.weight"),
        ("model.module_list.0.weight", "model.module_list.0.weight"),
    ],
)
def test_strip_wrappers(sent, name):
    assert strip_wrappers(sent) == name


def test_rotary_tables_are_no_weights():
    assert is_not_a_weight("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert is_not_a_weight("rotary_emb.cos_cached")
    assert not is_not_a_weight("model.layers.0.self_attn.q_proj.weight")
    assert not is_not_a_weight("model.rotary_emb.inv_freq.weight")


def test_names_of_layers_and_experts_are_written_as_one():
    names = [f"model.layers.{layer}.mlp.experts.{e}.w1.weight" for layer in (1, 2, 3, 7) for e in range(128)]
    assert {without_numbers(name) for name in names} == {"model.layers.*.mlp.experts.*.w1.weight"}
    assert in_one(names) == "model.layers.{1..3,7}.mlp.experts.{0..127}.w1.weight"
    assert in_one(names[:1]) == names[0]
    assert in_one(["layers.10.a", "layers.9.a"]) == "layers.{9..10}.a"
