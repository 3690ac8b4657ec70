"""A product over experts, in FP8 per block or per channel, or in BF16, for vLLM on a CPU without AMX: vLLM has none for FP8,
and packs BF16.

vLLM's own method, loaders and post-processing run unmodified, those of the GPU backend that a kernel of `cpu_kernel.py` stands
for; only the product is torch's. Where a backend asks DeepGEMM for a layout, it keeps the one it has, as on Hopper.
"""

from weakref import WeakKeyDictionary

import cpu_mxfp8
import cpu_nvfp4
import torch
from vllm import _custom_ops
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe import modular_kernel, unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.utils import deep_gemm
from vllm.v1.worker.workspace import WorkspaceManager

from fp8refit.kernels.placement import codes_in_rows, scales_in_rows

_WORKSPACE = WorkspaceManager(torch.device("cpu"), 1)
_last: WeakKeyDictionary = WeakKeyDictionary()
"""What each layer's experts dequantized last, from which bytes. Not on the experts, as in `cpu_kernel.py`."""


class ReferenceExperts(TritonExperts):
    """Multiplies by dequantized experts, gate above up; leaves storage as it was loaded."""

    is_up_first = False
    expects_unquantized_inputs = True

    @staticmethod
    def is_supported_config(*_):
        return True, None

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map, **others):
        assert not others["apply_router_weight_on_input"]
        w13_E2IH, w2_EHI = self._dequantized(w1, w2)
        x_NH, out_NH = hidden_states.double(), torch.zeros(hidden_states.shape, dtype=torch.float64)
        for expert in topk_ids.unique().tolist():
            place = expert if expert_map is None else int(expert_map[expert])
            if place < 0:
                continue  # another rank's
            tokens, choice = torch.where(topk_ids == expert)
            gate, up = (x_NH[tokens] @ w13_E2IH[place].t()).chunk(2, 1)
            if self.is_up_first:
                gate, up = up, gate
            y = (torch.nn.functional.silu(gate) * up) @ w2_EHI[place].t()
            out_NH.index_add_(0, tokens, y * topk_weights[tokens, choice].double()[:, None])
        output.copy_(out_NH)

    def _dequantized(self, *codes):
        """Made again only if a byte has changed: most of a tiny engine's time would go into it."""
        if self.w1_scale is None:
            return [each.double() for each in codes]
        alphas = [each for each in (self.g1_alphas, self.g2_alphas) if each is not None]
        scales = [each.view(torch.uint8) if each.itemsize == 1 else each for each in (self.w1_scale, self.w2_scale)]
        held = (*(c.view(torch.uint8) for c in codes), *scales, *alphas)
        last = _last.get(self)
        if last is None or not all(map(torch.equal, held, last[0])):
            given = zip(codes, (self.w1_scale, self.w2_scale), alphas or (None, None), strict=True)
            weights = [_dequantize(*each) for each in given]
            last = _last[self] = tuple(tensor.clone() for tensor in held), weights
        return last[1]


class TileExperts(ReferenceExperts):
    """Reads MXFP8, in rows or as Marlin's kernels do."""


class UpFirstExperts(ReferenceExperts):
    """Stands for FlashInfer's product, which wants up above gate."""

    is_up_first = True


def _dequantize(codes, scale, alphas=None):
    rows, columns = codes.shape[1:]
    if alphas is not None:
        return cpu_nvfp4.dequantized_experts(codes, scale, alphas).double()
    if scale.ndim == 1:
        scale = scale.view(-1, 1, 1).expand(-1, rows, 1)
    if scale.shape[1:] == (rows, 1):
        return (codes.float() * scale).double()
    if codes.dtype is torch.int32:
        tiles, scale = codes.view(torch.float8_e4m3fn), scale.view(torch.uint8)
        codes = codes_in_rows(tiles.view(*tiles.shape[:-1], -1, 1024))
        scale = scales_in_rows(scale.view(*scale.shape[:-1], -1, 64))
        columns = codes.shape[2]
    if scale.dtype is torch.uint8:
        return (codes.float() * (scale.float() - 127).exp2().repeat_interleave(columns // scale.shape[2], 2)).double()
    scale_of_each = scale.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[:, :, :columns]
    return (codes.float() * scale_of_each).double()


EXPERTS = {
    "fp32": (oracle.Fp8MoeBackend.TRITON, ReferenceExperts),
    "ue8m0": (oracle.Fp8MoeBackend.DEEPGEMM, ReferenceExperts),
    "tiles": (oracle.Fp8MoeBackend.TRITON, ReferenceExperts),
    "up first": (oracle.Fp8MoeBackend.FLASHINFER_CUTLASS, UpFirstExperts),
    "repacking": (getattr(oracle.Fp8MoeBackend, "HPC", oracle.Fp8MoeBackend.MARLIN), ReferenceExperts),
}


def register(kind: str) -> None:
    """Make the product of `kind` that of every layer of experts in this process."""
    chosen, experts = EXPERTS[kind]
    oracle.backend_to_kernel_cls = lambda backend: [experts] if backend is chosen else []
    fp8_utils.is_deep_gemm_e8m0_used = deep_gemm.is_deep_gemm_e8m0_used = lambda: kind == "ue8m0"
    unquantized = UnquantizedMoeBackend.FLASHINFER_CUTLASS if experts.is_up_first else UnquantizedMoeBackend.TRITON
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda *_, **__: (unquantized, experts)
    cpu_mxfp8.register_experts(kind, TileExperts)
    cpu_nvfp4.register_experts(TileExperts)
    if chosen is oracle.Fp8MoeBackend.MARLIN:  # in versions without HPC; what it does needs a GPU
        oracle.prepare_fp8_moe_layer_for_marlin = lambda layer, *held: held
    fp8_utils.deepgemm_post_process_weight_scale_block = lambda *, ws, **layout: ws
    _custom_ops.topk_softmax = _topk_softmax
    _custom_ops.scaled_fp8_quant = _scaled_fp8_quant
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = _all_gatherv, _reduce_scatterv
    # vLLM's CPU worker makes no workspace, and its model runner resets what there is as it shuts down.
    modular_kernel.current_workspace_manager = lambda: _WORKSPACE


def _all_gatherv(communicator, given, dim=0, sizes=None):
    """Rows of every rank, of which each has its own number. vLLM has this for GPUs."""
    assert dim == 0
    if isinstance(given, list):
        return [_all_gatherv(communicator, each, dim, sizes) for each in given]
    sizes = sizes or [len(given)] * communicator.world_size
    padded = given.new_zeros(max(sizes), *given.shape[1:])
    padded[: len(given)] = given
    found = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(found, padded, group=communicator.device_group)
    return torch.cat([rows[:size] for rows, size in zip(found, sizes, strict=True)])


def _reduce_scatterv(communicator, given, dim=0, sizes=None):
    """The sum over ranks of this rank's rows."""
    assert dim == 0
    summed = given.double()
    torch.distributed.all_reduce(summed, group=communicator.device_group)
    sizes = sizes or [len(given) // communicator.world_size] * communicator.world_size
    return summed.split(sizes)[communicator.rank_in_group].to(given.dtype)


def _topk_softmax(weights_NK, ids_NK, token_expert_indices, scores_NE, renormalize=False, bias=None, is_padding=None):
    """vLLM's, which its older builds for CPUs do not have."""
    assert bias is None and is_padding is None
    weights, ids = torch.softmax(scores_NE.float(), -1).topk(ids_NK.shape[1], -1)
    weights_NK.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    ids_NK.copy_(ids)


def _scaled_fp8_quant(x_NK, scale=None, use_per_token_if_dynamic=False, **options):
    """As vLLM's kernels for GPUs: by the reciprocal of a given scale, or of the tensor's own; rows are divided."""
    assert not options
    if use_per_token_if_dynamic:
        assert scale is None
        largest_N1 = x_NK.float().abs().amax(dim=1, keepdim=True)
        scale_N1 = (largest_N1 / torch.tensor(448.0)).clamp_min(1 / (448 * 512))
        return (x_NK / scale_N1).clamp(-448, 448).to(torch.float8_e4m3fn), scale_N1
    scale_1 = x_NK.float().abs().amax().reshape(1) / torch.tensor(448.0) if scale is None else scale
    return (x_NK.float() * (1 / scale_1)).clamp(-448, 448).to(torch.float8_e4m3fn), scale_1
