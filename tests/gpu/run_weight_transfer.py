"""vLLM's weight-transfer API with fp8refit as its backend; `test_weight_transfer.py` judges. The result is a JSON file.

python run_weight_transfer.py --shape S --work DIR --out FILE
"""

from surroundings import set_up

set_up(VLLM_USE_DEEP_GEMM="0")

if __name__ == "__main__":  # processes of engines import this file again, and nothing of what follows
    from weight_transfer_modes import main

    main()
