"""Checkpoints that are cut, rewritten, swapped and deleted at any moment: what was judged is in place, or it is refused."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8refit import InvalidSourceError, RefitError
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.live.dtypes import SAFETENSORS_DTYPES
from fp8refit.live.slots import FP8_DTYPE
from fp8refit.remote.servers import order_handler
from fp8refit.sources.files import SafetensorsFile
from fp8refit.sources.source import as_source
from tests.fake_ranks import ClientEntryPoint, Cluster, Drivers
from tests.fakes import FakeModel, make_policy
from tests.fuzz.engines import ROUTES, Subject, fake_engine  # noqa: F401 - a fixture

NAMES = [slot.name for slot in FakeModel().slots()]
INDEX = "model.safetensors.index.json"
UNUSED = "model.rotary_emb.inv_freq"
"""What files may hold, in any dtype, and no engine takes."""
LONG_AGO_NS = 10**18
STORABLE = [dtype for dtype in SAFETENSORS_DTYPES.values() if dtype is not torch.float8_e8m0fnu]
"""Not every version of the library that writes the files knows this one."""

fractions = st.floats(0, 1, exclude_max=True)


def save(policy: dict[str, Tensor], folder: Path, shards: int, *, with_index: bool) -> list[Path]:
    """A checkpoint written long ago."""
    folder.mkdir()
    files = [folder / f"{chr(ord('a') + place)}.safetensors" for place in range(shards)]
    names = list(policy)
    for place, file in enumerate(files):
        save_file({name: policy[name].contiguous() for name in names[place::shards]}, file)
        os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
    if with_index:
        weight_map = {name: files[place % shards].name for place, name in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return files


def load(folder: Path) -> dict[str, Tensor] | None:
    """What another reader finds in a checkpoint."""
    try:
        files = sorted(folder.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None


def cut(file: Path, fraction: float) -> None:
    os.truncate(file, int(file.stat().st_size * fraction))


def grow(file: Path, fraction: float) -> None:
    with file.open("ab") as stream:
        stream.write(b"\0" * (1 + int(100 * fraction)))


def flip(file: Path, fraction: float) -> None:
    """One byte of it becomes another, in place."""
    with file.open("r+b") as stream:
        place = int(file.stat().st_size * fraction)
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ (1 + int(fraction * 1e6) % 255)]))


def flip_in_header(file: Path, fraction: float) -> None:
    length = int.from_bytes(file.read_bytes()[:8], "little")
    flip(file, fraction * (8 + length) / file.stat().st_size)


def other_policy(file: Path) -> Path:
    """A file of the same shapes beside it."""
    other = file.with_suffix(".other")
    save_file({name: tensor if name == UNUSED else -tensor for name, tensor in load_file(file).items()}, other)
    return other


def rewrite(file: Path, fraction: float) -> None:
    """Another policy of the same shapes, in place."""
    other = other_policy(file)
    with file.open("r+b") as stream:
        stream.write(other.read_bytes())
    other.unlink()


def swap(file: Path, fraction: float) -> None:
    """Another policy of the same shapes, size and time, in its place."""
    other, times = other_policy(file), file.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.rename(file)


def delete(file: Path, fraction: float) -> None:
    file.unlink()


CHECKPOINT = {"shards": st.integers(1, 3), "with_index": st.booleans(), "dtype": st.sampled_from(STORABLE)}
DEEP = b'{"a":' * 100_000
NO_INDEX = {
    "nothing": b"",
    "half": b'{"weight_map": {"a": ',
    "deep": DEEP,
    "deep list": b"[" * 100_000,
    "no UTF-8": b"\xff\xfe{}",
    "null": b"null",
    "number": b"5",
    "list": b"[]",
    "no map": b'{"weights": {}}',
    "null for a map": b'{"weight_map": null}',
    "list for a map": b'{"weight_map": ["a.safetensors"]}',
    "half a character": b'{"weight_map": {"a": "\\ud800"}}',
}
NO_FILES = {
    "number": 5,
    "null": None,
    "bool": True,
    "list": [],
    "map": {},
    "nothing": "",
    "itself": ".",
    "root": "/",
    "absent": "nowhere",
    "long": "x" * 300,
    "deep": "x/" * 3000,
    "zero": "x\0y",
}
NO_HEADER = {
    "deep": DEEP,
    "no UTF-8": b"\xff" * 20,
    "null": b"null",
    "list": b"[]",
    "half": b'{"a": {"dtype": "BF16", ',
    "nothing": b"",
    "half a character": b'{"\\ud800": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}',
}
ODD_ENTRIES = {
    "dtype": [None, 5, "F4", "F64", "U8", "bf16", ""],
    "shape": [
        None,
        5,
        "text",
        [1.5],
        [-1],
        [True],
        [None],
        [1 << 70],
        [1 << 62, 4],
        [1 << 62, 1 << 62, 0],
        [],
        [0],
        [[1]],
    ],
    "data_offsets": [
        None,
        5,
        [],
        [0],
        [0, 1, 2],
        [-1, 4],
        [4, 0],
        [0, 1 << 63],
        [0, 1 << 62],
        [1.5, 2.5],
        [True, 4],
        ["0", "4"],
    ],
}

IN_PLACE = [cut, grow, flip, rewrite]
"""What changes a file under whoever reads it."""
ASIDE = [swap, delete]
"""What leaves it to them."""


class Files(RuleBasedStateMachine):
    """One engine, refitted from checkpoints again and again."""

    subject: Subject | None = None

    @initialize(route=st.sampled_from([*ROUTES, "here"]), is_seen=st.booleans())
    def start(self, route, is_seen):
        self.subject = Subject(route)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(order_handler, "can_read", lambda path: is_seen)
        self.is_strict = "twice" in route
        self.root = Path(tempfile.mkdtemp())
        self.seed = 0

    def teardown(self):
        if self.subject is not None:
            self.subject.close()
            self.patch.undo()
            shutil.rmtree(self.root)

    def write(self, shards: int, with_index: bool, dtype: torch.dtype) -> tuple[dict[str, Tensor], Path, list[Path]]:
        self.seed += 1
        policy = make_policy(self.subject.model, self.seed)
        unused = torch.arange(16, dtype=torch.uint8).view(dtype)
        if dtype is torch.bool:
            unused = torch.arange(16) > 5
        folder = self.root / str(self.seed)
        return policy, folder, save({**policy, UNUSED: unused}, folder, shards, with_index=with_index)

    @rule(**CHECKPOINT)
    def refit(self, shards, with_index, dtype):
        policy, folder, files = self.write(shards, with_index, dtype)
        self.subject.good(files[0] if shards == 1 else str(folder), policy)

    @rule(
        **CHECKPOINT,
        change=st.sampled_from([*IN_PLACE, flip_in_header, flip_in_header, swap, delete]),
        fraction=fractions,
    )
    def change_before(self, shards, with_index, dtype, change, fraction):
        """Whoever reads it later reads what is there then, or nothing."""
        _, folder, files = self.write(shards, with_index, dtype)
        change(files[int(fraction * shards)], fraction)
        found = load(folder)
        if change in (cut, grow, delete):
            self.subject.bad(folder, is_seen_before=True)
        else:
            self.subject.either(folder, found)

    @rule(
        **CHECKPOINT,
        change=st.sampled_from([*IN_PLACE, *ASIDE]),
        fraction=fractions,
        read=st.integers(0, len(NAMES) - 1),
    )
    def change_while_it_is_read(self, shards, with_index, dtype, change, fraction, read):
        policy, folder, _ = self.write(shards, with_index, dtype)
        countdown, when_read = read, SafetensorsFile.read

        def read_later(file: SafetensorsFile, *args: object) -> None:
            nonlocal countdown
            countdown -= 1
            if countdown == -1:
                change(file.path, fraction)
            when_read(file, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SafetensorsFile, "read", read_later)
            if change in ASIDE:
                self.subject.good(folder, policy)
            else:
                error = self.subject.bad(folder, is_seen_before=self.is_strict)
                assert "changed after it was checked" in str(error), error
        assert countdown < 0

    @rule(**CHECKPOINT, content=st.sampled_from(list(NO_INDEX)))
    def spoil_the_index(self, shards, with_index, dtype, content):
        _, folder, _ = self.write(shards, with_index, dtype)
        (folder / INDEX).write_bytes(NO_INDEX[content])
        self.subject.bad(folder, is_seen_before=True)

    @rule(**CHECKPOINT, file=st.sampled_from(list(NO_FILES)))
    def misname_a_shard(self, shards, with_index, dtype, file):
        _, folder, files = self.write(shards, with_index, dtype)
        weight_map = dict.fromkeys(NAMES, files[0].name) | {NAMES[3]: NO_FILES[file]}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        self.subject.bad(folder, is_seen_before=True)

    @rule(
        **CHECKPOINT,
        content=st.sampled_from(list(NO_HEADER)),
        claimed=st.sampled_from([None] * 4 + [0, 7, 1 << 40, (1 << 64) - 1]),
    )
    def spoil_a_header(self, shards, with_index, dtype, content, claimed):
        _, folder, files = self.write(shards, with_index, dtype)
        _replace_header(files[0], NO_HEADER[content], claimed)
        self.subject.bad(folder, is_seen_before=True)

    @rule(
        **CHECKPOINT,
        odd=st.sampled_from([(key, place) for key, values in ODD_ENTRIES.items() for place in range(len(values))]),
        which=st.integers(0, 2),
    )
    def misstate_a_tensor(self, shards, with_index, dtype, odd, which):
        _, folder, files = self.write(shards, with_index, dtype)
        content = files[0].read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        names = [name for name in header if name != UNUSED]
        key, place = odd
        header[names[which]][key] = ODD_ENTRIES[key][place]
        _replace_header(files[0], json.dumps(header).encode(), None)
        self.subject.bad(folder, is_seen_before=True)


def _replace_header(file: Path, header: bytes, claimed: int | None) -> None:
    """Another header before the same bytes, of the length that it has or of one that is claimed."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes(
        (len(header) if claimed is None else claimed).to_bytes(8, "little") + header + content[8 + length :]
    )


TestFiles = Files.TestCase


@given(
    changes=st.lists(st.tuples(st.sampled_from([swap, *IN_PLACE, *ASIDE]), fractions), min_size=1, max_size=3),
    shards=st.integers(1, 3),
    with_index=st.booleans(),
)
def test_an_engine_opens_what_was_judged(changes, shards, with_index):
    """Files change after the trainer judged them, and before ranks in another process open them."""
    subject = Subject("through a bucket")
    with tempfile.TemporaryDirectory() as scratch:
        for seed, (change, fraction) in enumerate(changes):
            folder = Path(scratch) / str(seed)
            policy = make_policy(subject.model, seed)
            files = save(policy, folder, shards, with_index=with_index)
            waiting = [partial(change, files[int(fraction * shards)], fraction)]

            def on_message(message: str, waiting: list[Callable[[], None]] = waiting) -> str:
                if "stamps" in message and waiting:
                    waiting.pop()()
                return message

            subject.on_message = on_message
            subject.bad(folder, is_seen_before=True)
            assert not waiting, "it was changed"
            if change is swap:
                assert subject.either(folder, load(folder)), "and the next order judges anew"
    subject.close()


@given(
    change=st.sampled_from([swap, *IN_PLACE]), fraction=fractions, shards=st.integers(1, 3), with_index=st.booleans()
)
def test_ranks_with_drivers_of_their_own_take_one_checkpoint(change, fraction, shards, with_index):
    """It changes when one rank has opened it and the other has not: no policy is committed on any, and a whole one is then."""
    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
        patch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])
        drivers, folder = Drivers(cluster), Path(scratch) / "latest"
        files = save(cluster.make_policy(seed=1), folder, shards, with_index=with_index)
        first = {"state_dict": as_source(folder)}
        change(files[int(fraction * shards)], fraction)
        try:
            second = {"state_dict": as_source(folder)}
        except InvalidSourceError:  # cut in its header, or no header any more
            return
        outcomes = drivers.refit(first, second)
        assert all(isinstance(outcome, RefitError) for outcome in outcomes), outcomes
        assert {version for _, version in cluster.states} == {0}
        healed = save(cluster.make_policy(seed=2), Path(scratch) / "next", shards, with_index=with_index)
        drivers.refit({"state_dict": healed[0].parent})
        cluster.assert_holds(cluster.make_policy(seed=2), version=1)


@given(
    dtype=st.sampled_from([dtype for dtype in STORABLE if dtype is not FP8_DTYPE]),
    values=st.binary(min_size=16, max_size=16),
    shards=st.integers(1, 3),
)
def test_quantize_copies_what_it_does_not_quantize(dtype, values, shards):
    """In its dtype, bit for bit; only fp32 becomes BF16."""
    raw = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    buffer = (raw > 99) if dtype is torch.bool else raw.view(dtype)
    is_number = bool(torch.isfinite(buffer.to(torch.complex128 if dtype.is_complex else torch.float64)).all())
    with tempfile.TemporaryDirectory() as scratch:
        src, dst = Path(scratch) / "src", Path(scratch) / "dst"
        weights = {"a.q_proj.weight": torch.randn(8, 8).bfloat16(), "a.table": buffer, "a.norm.weight": torch.ones(8)}
        save(weights, src, shards, with_index=False)
        (src / "config.json").write_text("{}")
        assert as_source(src).metadata["a.table"].dtype is dtype
        if not is_number:
            with pytest.raises(ValueError, match=r"a\.table"):
                quantize_checkpoint(src, dst)
            return
        quantize_checkpoint(src, dst)
        written = load(dst)["a.table"]
    expected = buffer.to(torch.bfloat16) if dtype is torch.float32 else buffer
    assert written.dtype is expected.dtype
    assert written.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


@given(
    dtype=st.text(min_size=1, max_size=9).filter(lambda text: text not in SAFETENSORS_DTYPES), quantizes=st.booleans()
)
def test_a_dtype_that_nobody_knows_is_named(dtype, quantizes):
    header = json.dumps({"a.table": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2]}}).encode()
    with tempfile.TemporaryDirectory() as scratch:
        src = Path(scratch)
        (src / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
        (src / "config.json").write_text("{}")
        read: Callable[[], object] = (
            (lambda: quantize_checkpoint(src, src / "dst")) if quantizes else lambda: as_source(src)
        )
        with pytest.raises(InvalidSourceError) as raised:
            read()
    assert json.dumps(dtype)[1:-1] in json.dumps(str(raised.value))
