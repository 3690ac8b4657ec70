"""Copies of the project, for what changes its code."""

import shutil
import subprocess
from pathlib import Path


def copy_tracked(tree: Path, folder: Path) -> None:
    """Copy what git tracks in `tree`, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, folder / name)
