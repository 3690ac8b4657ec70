"""Scripts in the process of a scenario, which has imported their engine: an import takes longer than a tiny boot."""

import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile


def run_script(script: str, arguments: Sequence[str]) -> dict:
    """Run one to its end, as the main program that it is, and give its standard output."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as Python does for scripts
    with TemporaryFile("w+", buffering=1) as output:
        try:
            with redirect_stdout(output):
                runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, f"{script} ended with {ended.code}"
        finally:
            output.seek(0)
            said = output.read()
            print(said)  # into the log
    return {"output": said}
