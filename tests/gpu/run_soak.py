"""One vLLM engine in this process that is refitted over and over; `test_soak.py` judges. The result is a JSON file.

    python run_soak.py soak --shape S --refits N --work DIR --out FILE    N refits of every kind, requests between some
    python run_soak.py once --shape S --refits N --work DIR --out FILE    the last of those policies, in one refit

`--shape tiny --refits 30` tries it without a GPU, where vLLM runs on a CPU.
"""

from surroundings import set_up

set_up(VLLM_ENABLE_V1_MULTIPROCESSING="0")

if __name__ == "__main__":
    from soak_modes import main

    main()
