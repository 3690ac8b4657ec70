"""One SGLang engine, whose scheduler is in another process; `test_sglang.py` compares. The result is a JSON file.

    python run_sglang.py refit      --shape S --work DIR --out FILE    dummy engine, 50 refits; SGLang's own update beside ours
    python run_sglang.py checkpoint --shape S --work DIR --out FILE    write policy 1 as block FP8, by the layout of `refit`
    python run_sglang.py fresh      --shape S --work DIR --out FILE    boot from the FP8 checkpoint of `checkpoint`
    python run_sglang.py sleep      --shape S --work DIR --out FILE    refit between release and resumption of memory
    python run_sglang.py families   --shape - --work DIR --out FILE    refit small engines of other families; boot them afresh

`--shape tiny --refits 8 --rounds 3` tries it without a GPU, where SGLang runs on a CPU.
"""

import os
import sys
from pathlib import Path

os.environ |= {
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
}

sys.path.append(str(Path(__file__).parents[1]))

if __name__ == "__main__":  # SGLang's processes import this file again, and nothing of what follows
    from sglang_modes import main

    main()
