"""Files are read, not mapped: any box of any tensor, and nothing that was changed."""

import gc
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import fp8refit.sources.files
from fp8refit.errors import InvalidSourceError
from fp8refit.live.dtypes import SAFETENSORS_DTYPES
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.files import SafetensorsFile, Threads
from fp8refit.transport.stamps import FileStamp

MATRIX = torch.arange(300 * 200, dtype=torch.int32).view(300, 200)
CUBE = torch.arange(4 * 30 * 20, dtype=torch.int16).view(4, 30, 20)


@pytest.fixture(params=[4 << 20, 5000, 64])
def chunk_bytes(request, monkeypatch):
    """How much one thread reads at a time."""
    monkeypatch.setattr(fp8refit.sources.files, "_CHUNK_BYTES", request.param)


@pytest.fixture
def path(tmp_path):
    save_file({"matrix": MATRIX, "cube": CUBE, "one": torch.tensor(7), "empty": MATRIX[:0]}, tmp_path / "a.safetensors")
    os.utime(tmp_path / "a.safetensors", ns=(10**18, 10**18))
    return tmp_path / "a.safetensors"


def read_box(stored, cut):
    box = cut(stored.meta)
    into = torch.full(box.shape, -1, dtype=box.dtype)
    stored.read_box(box, into)
    return into


BOXES = {
    "all": lambda t: t,
    "rows": lambda t: t[10:20],
    "one row": lambda t: t[10:11],
    "columns": lambda t: t[:, 3:17],
    "one column": lambda t: t[:, 5:6],
    "a box": lambda t: t[7:29, 3:17],
    "transposed": lambda t: t.mT,
    "a box of the transposed": lambda t: t.mT[3:17, 7:29],
    "nothing": lambda t: t[:0],
}


@pytest.mark.parametrize("cut", BOXES.values(), ids=BOXES)
def test_any_box_is_read(cut, path, chunk_bytes):
    tensors = SafetensorsFile(path, Threads()).tensors
    assert torch.equal(read_box(tensors["matrix"], cut), cut(MATRIX))
    for expert in (0, 3):
        assert torch.equal(read_box(tensors["cube"], lambda t, e=expert: cut(t[e])), cut(CUBE[expert]))


def test_whole_tensors_are_read(path, chunk_bytes):
    source = SafetensorsSource(path)
    given = dict(source)
    assert torch.equal(given["matrix"], MATRIX) and torch.equal(given["cube"], CUBE)
    assert given["one"].shape == () and given["one"] == 7 and given["empty"].shape == (0, 200)
    assert torch.equal(source.pick(["cube"])["cube"], CUBE)


@given(st.data())
def test_whatever_is_cut(data):
    """The same as of a tensor, for any view of it."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=data.draw(st.sampled_from([torch.int16, torch.int64]))).view(
        shape
    )

    def cut(t):
        for dim, (start, length) in enumerate(ranges):
            t = t.narrow(dim, start, length)
        return t.permute(order)

    ranges = [
        (start, data.draw(st.integers(0, size - start)))
        for size in shape
        for start in [data.draw(st.integers(0, size - 1))]
    ]
    order = data.draw(st.permutations(range(len(shape))))
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8refit.sources.files, "_CHUNK_BYTES", data.draw(st.integers(8, 200)))
        save_file({"a": tensor}, file.name)
        (stored,) = SafetensorsSource(Path(file.name)).stored.values()
        assert torch.equal(read_box(stored, cut), cut(tensor))


@pytest.mark.parametrize("name", SAFETENSORS_DTYPES)
def test_every_dtype_is_read_bit_for_bit(name, tmp_path):
    dtype, raw = SAFETENSORS_DTYPES[name], bytes(range(1, 17)) if name != "BOOL" else bytes([0, 1] * 8)
    header = json.dumps({"a": {"dtype": name, "shape": [16 // dtype.itemsize], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw)
    tensor = dict(SafetensorsSource(tmp_path))["a"]
    assert tensor.dtype is dtype and bytes(tensor.view(torch.uint8).tolist()) == raw


def test_the_engine_of_a_slice_reads_its_rows_alone(path, monkeypatch):
    counted = []
    monkeypatch.setattr(
        os, "preadv", lambda fd, to, where, real=os.preadv: counted.append(len(to[0])) or real(fd, to, where)
    )
    stored = SafetensorsFile(path, Threads()).tensors["matrix"]
    counted.clear()
    read_box(stored, lambda t: t[10:20])
    assert sum(counted) == 10 * 200 * 4


CHANGES = {
    "cut short": lambda path: os.truncate(path, 5000),
    "longer": lambda path: path.open("ab").write(b"\0"),
    "written to": lambda path: path.open("r+b").write(path.read_bytes()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_file_that_is_changed_in_place_is_told(is_in_memory, change, path):
    if is_in_memory:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            tell_a_change(change, Path(shutil.copy(path, folder)))
    else:
        tell_a_change(change, path)


def tell_a_change(change, path):
    source = SafetensorsSource(path)
    change(path)
    gc.collect()  # what was written is written
    with pytest.raises(InvalidSourceError, match=r"a\.safetensors: changed after it was checked"):
        list(source)


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_is_replaced_or_deleted_is_read_as_it_was(replace, path):
    source = SafetensorsSource(path)
    if replace:
        save_file({"matrix": -MATRIX}, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    else:
        path.unlink()
    assert torch.equal(dict(source)["matrix"], MATRIX)


def test_what_was_judged_elsewhere_is_what_is_opened(path):
    stamps = SafetensorsSource(path).stamps
    assert [FileStamp.model_validate_json(stamp.model_dump_json()) for stamp in stamps] == list(stamps)
    assert SafetensorsSource(path, judged=stamps).stamps == stamps
    with pytest.raises(InvalidSourceError, match="holds other files than when it was checked"):
        SafetensorsSource(path, judged=())
    save_file({"matrix": -MATRIX, "cube": CUBE, "one": torch.tensor(7), "empty": MATRIX[:0]}, path.with_suffix(".new"))
    os.utime(path.with_suffix(".new"), ns=(10**18, 10**18))
    path.with_suffix(".new").rename(path)
    with pytest.raises(InvalidSourceError, match="changed, or was replaced, after it was checked"):
        SafetensorsSource(path, judged=stamps)


def test_hosts_may_number_files_differently(path):
    (stamp,) = SafetensorsSource(path).stamps
    assert not stamp.is_of(stamp.model_copy(update={"inode": 3}))
    elsewhere = stamp.model_copy(update={"inode": 3, "boot": "elsewhere"})
    assert stamp.is_of(elsewhere)
    assert not stamp.is_of(elsewhere.model_copy(update={"mtime_ns": 3}))


def test_files_and_threads_go_with_the_source(path, chunk_bytes):
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    source = SafetensorsSource(path)
    list(source)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    del source
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("fp8refit-files"):
            thread.join(10)
    assert len(os.listdir("/proc/self/fd")) == descriptors and threading.active_count() == threads


def test_a_folder_or_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(
        InvalidSourceError, match=r"pipe\.safetensors: cannot be read as safetensors \(it is not a file\)"
    ):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("shape", [[2**40, 2**40, 0], [0, 2**62, 4], [2**62, 2**62, 0]])
def test_a_shape_that_no_memory_holds_is_refused(shape, tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidSourceError, match=r"cannot be read as safetensors \(a has shape .* is too large"):
        SafetensorsSource(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", ["../other/a.safetensors", "{}/other/a.safetensors", "deep/../../other/a.safetensors"])
def test_an_index_names_no_file_outside_its_folder(name, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "here").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "other" / "a.safetensors")
    index = tmp_path / "here" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name.format(tmp_path)}}))
    with pytest.raises(InvalidSourceError, match="lies outside its folder"):
        SafetensorsSource(tmp_path / "here")
    (tmp_path / "here" / "link.safetensors").symlink_to(tmp_path / "other" / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "link.safetensors"}}))
    assert list(dict(SafetensorsSource(tmp_path / "here"))) == ["a"], "caches of hubs are links"
