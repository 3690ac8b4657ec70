"""Every way in which a trained weight may change: each function changes the weights of a model that has gradients."""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from fp8refit.kernels.merge import add_product

OPTIMIZERS = {
    f"{kind.__name__} {mode or 'plain'}": (kind, {mode: True} if mode else {"foreach": False, "fused": False})
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    for mode in ("", "foreach", "fused")
}

SHARDED_OPTIMIZERS = [name for name in OPTIMIZERS if name not in ("SGD fused", "Adagrad fused")]
"""Those that torch can step DTensors with."""


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def masters(model):
    """What a trainer may write: of a sharded model, this rank's rows, as an optimizer holds them."""
    weights = [layer.trained_weight.parameter for layer in linears(model)]
    return [getattr(weight, "_local_tensor", weight) for weight in weights]


def other_state(model):
    return {name: tensor * -1.5 for name, tensor in model.state_dict().items()}


def multiply_data(model):
    for master in masters(model):
        master.data.mul_(-1.5)


def copy_data(model):
    for master in masters(model):
        master.data.copy_(master.detach().flip(0))


def flip_signs(model):
    """Every bit pattern of an even number of values gets the same change."""
    for master in masters(model):
        master.data.neg_()


def trade_two_values(model):
    """Sums stay as they are."""
    for master in masters(model):
        flat = master.data.view(-1)
        if len(flat) > 1:
            flat[0], flat[-1] = flat[-1] + 1, flat[0] - 1


def write_from_elsewhere(model):
    """As a kernel of somebody: torch does not see it."""
    for master in masters(model):
        values = master.detach().view(torch.uint8).numpy().view("uint8")
        values[...] = (master.detach() / 2).view(torch.uint8).numpy()


def write_with_our_kernels(model):
    for master in masters(model):
        data = master.data
        add_product(data, data.new_ones(len(data), 1), data.new_full((1, data.shape[1]), 0.3), 1.0, out=data)


def write_many_at_once(model):
    torch._foreach_mul_([master.data for master in masters(model)], 1.25)


def write_in_inference_mode(model):
    with torch.inference_mode():
        for master in masters(model):
            master.mul_(0.7)


def load(model):
    model.load_state_dict(other_state(model))


def load_by_assigning(model):
    model.load_state_dict(other_state(model), assign=True)


def load_as_distributed_checkpoints_do(model):
    set_model_state_dict(model, other_state(model))


CHANGES = {
    change.__name__: change
    for change in (
        multiply_data,
        copy_data,
        flip_signs,
        trade_two_values,
        write_from_elsewhere,
        write_with_our_kernels,
        write_many_at_once,
        write_in_inference_mode,
        load,
        load_by_assigning,
        load_as_distributed_checkpoints_do,
    )
}
"""Of whole and of sharded weights."""


def replace_data(model):
    for layer in linears(model):
        layer.weight.data = layer.weight.data.clone() + 0.5


def replace_parameters(model):
    for layer in linears(model):
        layer.weight = nn.Parameter(layer.weight.detach() + 0.5)


def write_a_flat_buffer(model):
    """As trainers with flat parameters do: the first call makes every weight a view of one tensor."""
    layers = linears(model)
    flat = torch.cat([layer.weight.detach().flatten() for layer in layers])
    for layer, part in zip(layers, flat.split([layer.weight.numel() for layer in layers]), strict=True):
        layer.weight.data = part.view_as(layer.weight)
    model(torch.ones(2, layers[0].in_features).to(flat))  # the codes are those of the views
    flat.mul_(1.5)


WHOLE_CHANGES = CHANGES | {
    change.__name__: change for change in (replace_data, replace_parameters, write_a_flat_buffer)
}
