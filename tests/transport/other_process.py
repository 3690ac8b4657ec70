"""Another process: does what the lines on its standard input say, and answers each with a line of JSON.

["export", num_bytes]       a bucket with `tensors()` in it: its segment and references
["import", segments, refs]  what each tensor holds, or the error
["setuid", uid]             become another user
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from fp8refit import TransportError
from fp8refit.transport.memory.bucket import Bucket
from fp8refit.transport.memory.importer import Importer
from fp8refit.transport.memory.segment import Segment, TensorRef

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


class OtherProcess:
    """A script that answers lines of JSON, running."""

    def __init__(self, script=__file__, **environ):
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environ,
        )

    def ask(self, *order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the other process ended with {self.process.wait()} at {order[0]}"
        return json.loads(answer)

    def export(self, *arguments):
        segment, refs = self.ask("export", *arguments)
        return Segment.model_validate(segment), [TensorRef.model_validate(ref) for ref in refs]

    def open(self, segments, refs):
        return self.ask("import", [each.model_dump() for each in segments], [each.model_dump() for each in refs])

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def answer_orders(orders, errors=TransportError):
    """Do what each line says until there are no more; an error of those given is an answer.

    What anything else prints goes to standard error.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        try:
            answer = orders[order](*arguments)
        except errors as error:
            answer = {"error": f"{error}"}
        print(json.dumps(answer), file=answers, flush=True)


def tensors(device="cpu", seed=5):
    """Tensors of every dtype that sources have, in several layouts."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for dtype in DTYPES:
        values = torch.randn(6, 10, generator=generator).to(device, dtype)
        made |= {f"{dtype}": values, f"{dtype} transposed": values.t(), f"{dtype} scalar": values[1, 2]}
        made |= {f"{dtype} strided": values[1::2, 3:8], f"{dtype} empty": values[:0]}
    return made


def fingerprint(tensor):
    """Shape, dtype and bytes of a tensor."""
    values = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return [list(tensor.shape), str(tensor.dtype), hashlib.sha256(values.numpy().tobytes()).hexdigest()]


def main():
    importer, buckets = Importer(torch.device("cpu")), []

    def do_export(num_bytes):
        buckets.append(Bucket(num_bytes))
        refs = [buckets[-1].put(name, tensor) for name, tensor in tensors().items()]
        return [buckets[-1].segment.model_dump(), [ref.model_dump() for ref in refs]]

    def do_import(segments, refs):
        segments = [Segment.model_validate(segment) for segment in segments]
        opened = importer.open(segments, [TensorRef.model_validate(ref) for ref in refs])
        return {name: fingerprint(tensor) for name, tensor in opened.items()}

    answer_orders({"export": do_export, "import": do_import, "setuid": os.setuid})


if __name__ == "__main__":
    main()
