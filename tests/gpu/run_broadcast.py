"""A trainer on one GPU and vLLM engines on others; `test_broadcast.py` judges. The result is a JSON file.

python run_broadcast.py --shape S [--tp N] [--replicas R] --work DIR --out FILE
"""

from surroundings import set_up

set_up()

if __name__ == "__main__":  # processes of engines import this file again, and nothing of what follows
    from broadcast_modes import main

    main()
