"""What ranks of a trainer do in the tests of FSDP2. Each function runs on every rank at once."""

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fp8refit import PrecisionError, RefitError, Refitter, quantize_blockwise
from fp8refit.live.slots import SCALE_SUFFIX
from fp8refit.training import precision
from tests.training.precision.changes import CHANGES, OPTIMIZERS
from tests.training.precision.models import IDS, layout_of, loss_of, make_trainer, moe_layout, slot

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


def make_small(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    sizes = ((160, 272), (272, 96), (96, 24))
    part = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in sizes[:2]))
    return torch.nn.Sequential(part, torch.nn.Linear(*sizes[2], bias=False)).to(dtype)


def used_otherwise(model, call, scale_format):
    """Names of weights with which `call` computes otherwise than by what the whole masters give. Also what is never used."""
    used = {}

    def note(layer, *_):
        weight = layer.trained_weight
        used[weight.name] = weight.codes.view(torch.uint8).clone(), weight.scale.clone()

    # After FSDP gathered, and before it frees what it gathered.
    hooks = [layer.register_forward_pre_hook(note) for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    call()
    for hook in hooks:
        hook.remove()
    wrong = []
    for name, master in model.state_dict().items():
        codes, scale = quantize_blockwise(whole(master).bfloat16(), scale_format=scale_format)
        got = used.get(name)
        if got is None or not (torch.equal(got[0], codes.view(torch.uint8)) and torch.equal(got[1], scale)):
            wrong.append(name)
    return wrong


LAYOUTS = {
    "each": lambda model: [*model[0], model[1], model],
    "a part": lambda model: [model[0], model],
    "the whole": lambda model: [model],
}
"""Which modules `fully_shard` is called with."""


def shard_small(model, layout, mesh, **options):
    for module in LAYOUTS[layout](model):
        fully_shard(module, mesh=mesh, **options)
    return model


def small_loss(model):
    weight = next(model.parameters())
    dtype = torch.bfloat16 if weight.dtype is torch.bfloat16 else torch.float32
    return model(torch.linspace(-2, 3, 3 * 160, dtype=dtype).view(3, 160)).float().square().mean()


KEEP_SCALES = ("flip_signs", "copy_data", "trade_two_values")


def change_sharded(rank, layout, dtype):
    """What the next forward pass does not see of every change and every optimizer, also of a pass without gradients before."""
    found = []
    model = shard_small(make_small(dtype), layout, mesh_of(2))
    unified = precision.unify(model, like=small_layout(model, "fp32"))
    for name, change in CHANGES.items():
        with torch.no_grad():
            small_loss(model)  # FSDP leaves the root's weights gathered
        before = {weight.name: weight.scale.clone() for weight in unified._weights.weights}
        change(model)
        found += [f"{name}: {wrong}" for wrong in used_otherwise(model, lambda: small_loss(model).backward(), "fp32")]
        found += [
            f"{name}: {weight.name} is as before"
            for weight in unified._weights.weights
            if torch.equal(before[weight.name], weight.scale) and name not in KEEP_SCALES
        ]
        model.zero_grad()
    return found


def small_layout(model, scale_format):
    return layout_of([slot(name, tensor.shape, scale_format) for name, tensor in model.state_dict().items()])


def step_sharded(rank, optimizer):
    """Losses of a sharded trainer and of a whole one whose codes are computed anew before each pass: two micro-batches a step,
    one `served` in three steps, with what either of them does wrong.
    """
    kind, options = OPTIMIZERS[optimizer]
    model, plain = shard_small(make_small(), "each", mesh_of(2)), make_small()
    like = small_layout(plain, "fp32")
    unified = precision.unify(model, like=like)
    other = precision.unify(plain, like=like)
    optimizers = [kind(one.parameters(), lr=1e-2, **options) for one in (model, plain)]
    found, losses = [], []
    for step in range(6):
        for _ in range(2):
            for weight in other._weights.weights:
                if weight.scale is not None:
                    weight.scale.zero_()
            here = []
            found += used_otherwise(model, lambda here=here: here.append(small_loss(model)), "fp32")
            theirs = small_loss(plain)
            here[0].backward()
            theirs.backward()
            losses.append((here[0].item(), theirs.item()))
        for one in optimizers:
            one.step()
            one.zero_grad()
        if step % 3 == 2:
            found += differing(unified.served(), {n: whole(t) for n, t in model.state_dict().items()}, "fp32")
    found += [f"losses {losses}"] * (not all(abs(a - b) <= 1e-3 * abs(b) for a, b in losses))
    found += [f"nothing is learned {losses}"] * (losses[0][0] == losses[-1][0])
    return found


def train_in_parallel(rank, optimizer):
    """What a trainer of DDP uses or holds otherwise than by its masters."""
    kind, options = OPTIMIZERS[optimizer]
    model = make_small()
    unified = precision.unify(model, like=small_layout(model, "fp32"))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    trainer = kind(parallel.parameters(), lr=1e-2, **options)
    found = []
    for _ in range(3):
        found += used_otherwise(model, lambda: small_loss(parallel).backward(), "fp32")
        trainer.step()
        trainer.zero_grad()
    unified.served()
    return found


def change_one_rank(rank):
    """Only rank 0 writes, so only it could notice."""
    model = shard_small(make_small(), "each", mesh_of(2))
    precision.unify(model, like=small_layout(model, "fp32"))
    small_loss(model)
    if rank == 0:
        model[0][0].weight._local_tensor.data.mul_(-3)
    return used_otherwise(model, lambda: small_loss(model), "fp32")


def recompute_sharded(rank):
    """What goes wrong if each weight is stepped in the backward pass, which gathers again and recomputes."""
    from torch.utils.checkpoint import checkpoint

    model = shard_small(make_small(), "each", mesh_of(2))
    precision.unify(model, like=small_layout(model, "fp32"))
    x = torch.linspace(-2, 3, 3 * 160).view(3, 160).requires_grad_()
    small_loss(model)  # FSDP begins with the root
    found, used = [], {}
    for layer in (*model[0], model[1]):
        layer.register_forward_pre_hook(
            lambda layer, *_: used.setdefault(layer, []).append(layer.trained_weight.codes.view(torch.uint8).clone())
        )
    optimizers = {weight: torch.optim.AdamW([weight], lr=0.1, fused=True) for weight in model.parameters()}
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: optimizers[weight].step())
    for _ in range(3):
        used.clear()
        model[1](checkpoint(model[0], x, use_reentrant=False)).square().mean().backward()
        model.zero_grad()
        first, again = used[model[0][0]]
        found += ["recomputed with other codes"] * (not torch.equal(first, again))
        found += used_otherwise(model, lambda: small_loss(model), "fp32")
    return found


def call_what_is_not_gathered(rank):
    """What comes of calling a module that FSDP does not gather for."""
    model = shard_small(make_small(), "the whole", mesh_of(2))
    precision.unify(model, like=small_layout(model, "fp32"))
    small_loss(model).backward()
    try:
        model[1](torch.ones(2, 96))
    except PrecisionError as error:
        return error.problems
    return None


def do_sharded(rank, seed, layout, dtype, scale_format, optimizer, actions):
    """What a sharded trainer does wrong after any of some actions, each a name in `CHANGES` or one of those below."""
    model = shard_small(make_small(dtype, seed), layout, mesh_of(2))
    unified = precision.unify(model, like=small_layout(model, scale_format))
    kind, options = OPTIMIZERS[optimizer]
    trainer = kind(model.parameters(), lr=0.1, **options)
    found = []
    for number, action in enumerate(actions):
        if action in CHANGES:
            CHANGES[action](model)
            trainer = kind(model.parameters(), lr=0.1, **options) if action == "load_by_assigning" else trainer
        elif action == "train":
            small_loss(model).backward()
        elif action == "step":
            small_loss(model).backward()
            trainer.step()
            trainer.zero_grad()
        elif action == "one rank writes" and rank == 0:
            model[0][1].trained_weight.local.mul_(-2)
        elif action == "serve":
            found += differing(unified.served(), {n: whole(t) for n, t in model.state_dict().items()}, scale_format)
        with torch.set_grad_enabled(number % 2 == 0):
            found += [f"{action}: {name}" for name in used_otherwise(model, lambda: small_loss(model), scale_format)]
    return found
