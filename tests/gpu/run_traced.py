"""One engine of a whole model; `test_traced.py` compares. The result is a JSON file.

python run_traced.py refit --shape S --work DIR --out FILE   dummy engine, refitted from noise; writes its FP8 checkpoint
python run_traced.py fresh --shape S --work DIR --out FILE   boots from `refit`'s FP8 checkpoint
python run_traced.py held --shape S --work DIR --out FILE    prints what an engine's model holds beside its parameters

`--engine sglang` for SGLang. `--no-proof` leaves out the proof of the trace, to compare first refits.
`--shape tiny-moe` tries the script where an engine runs on a CPU.
"""

from surroundings import set_up

set_up(
    # In this process, so that what a refit leaves behind can be looked at.
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    SGLANG_ENABLE_JIT_DEEPGEMM="0",
    SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK="1",  # Triton's; that of FlashInfer is compiled from sources
)

if __name__ == "__main__":  # processes of engines import this file again, and nothing of what follows
    from traced_modes import main

    main()
