"""A vLLM engine that is refitted to the policy of `tests/cross_engine.py`; prints the digest of what it then holds.

python run_cross_engine.py FOLDER
"""

import sys
from pathlib import Path

import torch
from engines import booted_dummy, model_of

from fp8refit import Refitter
from tests.cross_engine import FAMILY, as_checkpoint, digest_of, make_policy
from tests.tiny_models import save_model


def main(folder: Path) -> None:
    torch.compiler.set_stance("force_eager")  # as `run_engine.py` says
    save_model(FAMILY, 1, folder)
    with booted_dummy(folder, "fp32") as llm:
        Refitter(llm).refit(make_policy())
        print("digest:", digest_of(as_checkpoint(model_of(llm).state_dict())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
