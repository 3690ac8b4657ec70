"""One engine of a model with experts or latent attention; `test_experts.py` compares. The result is a JSON file.

python run_experts.py refit --shape S [--tp N] [--ep] [--eager] --work DIR --out FILE   dummy engine, refitted to policy 1
python run_experts.py fresh --shape S [--tp N] [--ep] [--eager] --work DIR --out FILE   boots from `refit`'s FP8 checkpoint
python run_experts.py speed --shape S --work DIR --out FILE                             our refit beside vLLM's own reload

`--engine sglang` for SGLang, which `--shape tiny-moe` tries where it runs on a CPU.
"""

from surroundings import set_up

set_up(
    # Else requests reach the scheduler one by one, and what is batched with what, which the last bits depend on, is chance.
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    SGLANG_ENABLE_JIT_DEEPGEMM="0",
    SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK="0",  # other engines may have begun on one of the GPUs
    SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK="1",  # Triton's; that of FlashInfer is compiled from sources
)

if __name__ == "__main__":  # processes of engines import this file again, and nothing of what follows
    from experts_modes import main

    main()
