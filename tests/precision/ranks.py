"""What ranks of a trainer do in the tests of FSDP2. Each function runs on every rank at once."""

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fp8refit import PrecisionError, RefitError, Refitter, precision, quantize_blockwise
from fp8refit.live.slots import SCALE_SUFFIX
from tests.precision.models import IDS, layout_of, loss_of, make_trainer, moe_layout, slot

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model, mesh, policy=POLICY):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def short(model):
    """`model` without all layers but the first."""
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return model


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differing(served, masters, scale_format):
    """Names of what is not, bit for bit, what the quantizer makes of the whole master weights."""
    wrong = []
    for name, master in masters.items():
        if name + SCALE_SUFFIX not in served:
            continue
        pairs = [
            quantize_blockwise(m.bfloat16(), scale_format=scale_format) for m in master.view(-1, *master.shape[-2:])
        ]
        codes = torch.stack([codes for codes, _ in pairs]).view(torch.uint8).view_as(master)
        scale = torch.stack([scale for _, scale in pairs]).view_as(served[name + SCALE_SUFFIX])
        local = served[name].to_local().view(torch.uint8)
        mesh = served[name].device_mesh
        chunk = -(-len(master) // mesh.size(-1))
        first = chunk * mesh.get_local_rank(mesh.ndim - 1)
        mine = slice(first, first + chunk)
        if not (torch.equal(local, codes[mine]) and torch.equal(served[name + SCALE_SUFFIX], scale)):
            wrong.append(name)
    return wrong


def round_once_sharded(rank):
    """Whether a sharded trainer that rounds as kernels of GPUs do says what a whole one says."""
    from fp8refit_transformers import to_block_fp8

    engine = to_block_fp8(short(make_trainer("qwen3", torch.bfloat16, 1)))
    layout = Refitter(engine).layout().model_copy(update={"rounds_once": True})
    models = [short(make_trainer("qwen3", torch.bfloat16)) for _ in range(2)]
    shard(models[1], mesh_of(2))
    for model in models:
        precision.unify(model, like=layout)
    with torch.no_grad():
        one, other = (model(input_ids=IDS).logits for model in models)
    return torch.equal(one, other)


def train_sharded(rank, dtype, scale_format):
    """What is wrong after each of two steps of two micro-batches: bytes, and logits of trainer and engine."""
    from fp8refit_transformers import to_block_fp8

    model = short(make_trainer("qwen3", dtype))
    engine = to_block_fp8(short(make_trainer("qwen3", torch.bfloat16, 1)), scale_format=scale_format)
    refitter = Refitter(engine)
    shard(model, mesh_of(2))
    unified = precision.unify(model, like=refitter.layout())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(2):
        for _ in range(2):
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        served = unified.served()
        report = refitter.refit(served)
        found += differing(served, {n: whole(t) for n, t in model.state_dict().items()}, scale_format)
        found += [f"{report.num_quantized} were quantized"] * bool(report.num_quantized)
        live = engine.state_dict()
        found += [
            n for n in served if n in live and not _equal(live[n], whole_bytes(served[n]).to(live[n].device), served[n])
        ]
        with torch.no_grad():
            is_same = torch.equal(model(input_ids=IDS).logits, engine(input_ids=IDS).logits)
        found += ["they say different things"] * (not is_same)
    held = [weight.codes.untyped_storage().nbytes() for weight in unified._weights.weights if "layers" in weight.name]
    found += ["codes of layers are kept whole"] * (sum(held) > 0)
    return found


def whole_bytes(tensor):
    """All of a tensor, of which gloo sends no FP8."""
    if isinstance(tensor, DTensor) and tensor.dtype.itemsize == 1:
        raw = DTensor.from_local(
            tensor.to_local().view(torch.uint8),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        return raw.full_tensor()
    return whole(tensor)


def _equal(live, sent, tensor):
    return torch.equal(
        live.view(torch.uint8), sent if tensor.dtype.itemsize == 1 else sent.to(live.dtype).view(torch.uint8)
    )


def quantize_unaligned(rank, shape, scale_format):
    """Names whose bytes are wrong where ranks share blocks, or hold nothing."""
    torch.manual_seed(3)
    found = []
    for rows, cols in ((272, 160), (3, 130), (129, 128), (640, 256)):
        model = torch.nn.Sequential(torch.nn.Linear(cols, rows, bias=False))
        with torch.no_grad():
            model[0].weight *= torch.exp2(torch.randint(-9, 9, (rows, 1)))
        master = {"0.weight": model[0].weight.detach().clone()}
        fully_shard(model, mesh=mesh_of(*shape))
        unified = precision.unify(model, like=layout_of([slot("0.weight", (rows, cols), scale_format)]))
        found += [f"{rows}x{cols}" for _ in differing(unified.served(), master, scale_format)]
        x = torch.randn(4, cols)
        expected = torch.nn.Sequential(torch.nn.Linear(cols, rows, bias=False))
        expected.load_state_dict(master)
        precision.unify(expected, like=layout_of([slot("0.weight", (rows, cols), scale_format)]))
        y, expected_y = model(x), expected(x)
        y.sum().backward()
        expected_y.sum().backward()
        found += [f"{rows}x{cols} forward"] * (not torch.equal(y, expected_y))
        gradient = model[0].weight.grad.full_tensor()
        found += [f"{rows}x{cols} gradient"] * (not torch.allclose(gradient, expected[0].weight.grad, rtol=1e-4))
    return found


def compile_sharded(rank):
    """What compiled layers say otherwise than plain ones on one rank, over two micro-batches and a step."""
    torch.manual_seed(4)
    shapes = {"0.weight": (384, 256), "1.weight": (128, 384)}
    like = layout_of([slot(name, shape, "fp32") for name, shape in shapes.items()])
    model, plain = (
        torch.nn.Sequential(torch.nn.Linear(256, 384, bias=False), torch.nn.Linear(384, 128, bias=False)) for _ in "12"
    )
    plain.load_state_dict(model.state_dict())
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh_of(2))
    unified = [precision.unify(one, like=like) for one in (model, plain)]
    for layer in model:
        layer.compile(backend="aot_eager")
    found, x = [], torch.randn(16, 256)
    for step in range(2):
        for _ in range(2):
            y, expected = model(x), plain(x)
            found += [f"step {step}"] * (not torch.allclose(y, expected, rtol=1e-3, atol=1e-3))
            y.square().sum().backward()
            expected.square().sum().backward()
        for one in (model, plain):
            optimizer = torch.optim.SGD(one.parameters(), lr=1e-4)
            optimizer.step()
            optimizer.zero_grad()
        masters = {name: whole(tensor) for name, tensor in model.state_dict().items()}
        far = {n: t for n, t in plain.state_dict().items() if not torch.allclose(masters[n], t, rtol=1e-4, atol=1e-6)}
        found += [*far, *differing(unified[0].served(), masters, "fp32")]
    return found


def train_experts(rank, scale_format):
    """Names whose bytes are wrong after two steps."""
    model = short(make_trainer("qwen3_moe"))
    like = moe_layout(model, scale_format)
    shard(model, mesh_of(torch.distributed.get_world_size()))
    unified = precision.unify(model, like=like)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return differing(unified.served(), {n: whole(t) for n, t in model.state_dict().items()}, scale_format)


def shard_after(rank):
    """What comes of calling `fully_shard` after `unify`."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 256, bias=False))
    precision.unify(model, like=layout_of([slot("0.weight", (256, 128), "fp32")]))
    fully_shard(model, mesh=mesh_of(2))
    try:
        model(torch.randn(4, 128))
    except PrecisionError as error:
        return error.problems
    return None


def meet_nan(rank):
    """What every rank raises for NaN in the rows of one."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 256, bias=False))
    fully_shard(model, mesh=mesh_of(2))
    unified = precision.unify(model, like=layout_of([slot("0.weight", (256, 128), "fp32")]))
    unified.refresh()
    if rank == 0:
        with torch.no_grad():
            model[0].weight.to_local()[0, 0] = torch.nan
    try:
        unified.served()
    except RefitError as error:
        return type(error).__name__, error.names
    return None
