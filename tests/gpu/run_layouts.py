"""One vLLM engine whose workers are in other processes, or one rank of an external launcher's; `test_vllm_layouts.py`
compares. Prints nothing of its own; the result is a JSON file.

    python run_layouts.py refit --shape S --tp N --work DIR --out FILE     dummy engine, 50 refits between generations
    python run_layouts.py fresh --shape S --tp N --work DIR --out FILE     boot from the FP8 checkpoint of `checkpoint`
    python run_layouts.py checkpoint --shape S --work DIR --out FILE       write policy 1 as block FP8, by the layout of `refit`
    python run_layouts.py external --shape S --tp N ...                    one rank of an external launcher (RANK in env)
    python run_layouts.py served --shape S --work DIR --out FILE           AsyncLLM under load, requests kept
    python run_layouts.py sleep --shape S --tp N --work DIR --out FILE     refit between sleep and wake-up
"""

import sys

from surroundings import set_up

set_up(VLLM_ENABLE_V1_MULTIPROCESSING="0" if sys.argv[1].startswith("external") else "1")

if __name__ == "__main__":  # vLLM's processes import this file again, and nothing of what follows
    from layout_modes import main

    main()
