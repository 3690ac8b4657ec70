"""Faults in how sources are judged and read."""

from tests.planted.fault import Fault

SOURCES = "tests/fuzz/test_sources.py::TestSources"
AFTER_GOOD = "tests/fuzz/test_sources.py::test_no_bad_tensor_passes_after_good_ones"
ANNOUNCED = "tests/fuzz/test_sources.py::test_no_bad_tensor_passes_for_what_was_announced"
FILES = "tests/fuzz/test_files.py"
SECOND_NAME = "tests/fuzz/test_sources.py::test_the_second_name_of_a_tied_tensor_is_compared"
TWIN = "tests/tracing/test_twin.py"
OPENED = "tests/fuzz/test_files.py::test_an_engine_opens_what_was_judged"

FAULTS = [
    Fault(
        name="a tensor is taken whatever it stands on",
        at="fp8refit/live/storage.py::why_unreadable",
        before=(
            "type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided and not (tensor.is_meta "
            "or tensor.is_nested or tensor.is_neg()) and has_memory(tensor)"
        ),
        after=(
            "type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided and not (tensor.is_meta "
            "or tensor.is_nested or tensor.is_neg())"
        ),
        found_by=AFTER_GOOD,
        crashes=True,
    ),
    Fault(
        name="a subclass is taken whatever it stands on",
        at="fp8refit/live/storage.py::why_unreadable",
        before="_is_fake(tensor) or not has_memory(tensor)",
        after="not isinstance(tensor, Tensor)",
        found_by=AFTER_GOOD,
        crashes=True,
    ),
    Fault(
        name="a view with the other sign is taken",
        at="fp8refit/live/storage.py::why_unreadable",
        before="tensor.is_meta or tensor.is_nested or tensor.is_neg()",
        after="tensor.is_meta or tensor.is_nested",
        found_by=AFTER_GOOD,
    ),
    Fault(
        name="memory of a source that is recognised is not looked at",
        at="fp8refit/live/layout_guard.py::LayoutGuard.holds",
        before="not all(has_memory(tensors[place]) for place in np.flatnonzero(addresses != self.addresses).tolist())",
        after=(
            "False and not all(has_memory(tensors[place]) for place in np.flatnonzero(addresses != "
            "self.addresses).tolist())"
        ),
        found_by=AFTER_GOOD,
        crashes=True,
    ),
    Fault(
        name="a nested tensor is asked for its strides",
        at="fp8refit/live/layout_guard.py::LayoutGuard.holds",
        before='any(map(getattr, tensors, repeat("is_nested"), repeat(True))) or not self._guards.check(*tensors)',
        after="not self._guards.check(*tensors)",
        found_by=AFTER_GOOD,
        crashes=True,
    ),
    Fault(
        name="what a function returns is taken for an iterable",
        at="fp8refit/sources/pairs.py::named",
        before="not isinstance(items, Iterable) or isinstance(items, Tensor)",
        after="items is items and False",
        found_by=SOURCES,
    ),
    Fault(
        name="a name that is no text is taken",
        at="fp8refit/live/names.py::strip_wrappers",
        before="name.encode()",
        found_by="tests/sources/test_source.py",
    ),
    Fault(
        name="a broadcast takes another dtype than was announced",
        at="fp8refit/remote/broadcast/source_reader.py::Reader._stream",
        before="came != announced",
        after="came.shape != announced.shape",
        found_by=ANNOUNCED,
    ),
    Fault(
        name="a broadcast in another order is sent as the last one was announced",
        at="fp8refit/remote/broadcast/broadcast.py::Broadcast._offer",
        before="list(said.metadata)",
        after="sorted(said.metadata)",
        found_by="tests/fuzz/test_sources.py::test_a_broadcast_may_come_in_any_order",
    ),
    Fault(
        name="a dtype that cannot be sent is met while it is sent",
        at="fp8refit/remote/protocol/source_summary.py::summarize",
        before="unsendable(metadata)",
        after="unsendable({})",
        found_by=AFTER_GOOD,
    ),
    Fault(
        name="every expert of a saved checkpoint is told to be left out",
        at="fp8refit/fill/plan.py::PlanBuilder._add_unknown",
        before="self._held_stacked(name)",
        after="self._held_stacked(name)[:0]",
        found_by="tests/fuzz/test_sources.py::test_a_saved_mixture_of_experts_is_told_in_one_line",
    ),
    Fault(
        name="quantize narrows dtypes that it does not know to bytes",
        at="fp8refit/checkpoint/outputs.py::output_by_name",
        before="torch.bfloat16 if is_rounded else meta.dtype",
        after="torch.bfloat16 if is_rounded else meta.dtype if meta.dtype.itemsize > 2 else torch.uint8",
        found_by=FILES,
    ),
    Fault(
        name="files announce bytes for dtypes that they do not know",
        at="fp8refit/sources/checkpoints.py::SafetensorsSource.__init__",
        before="TensorMeta.of(tensor.meta)",
        after=(
            "TensorMeta(shape=tuple(tensor.meta.shape), dtype=torch.uint8 if tensor.meta.dtype is "
            "torch.int16 else tensor.meta.dtype)"
        ),
        found_by=FILES,
    ),
    Fault(
        name="a dtype that no file may hold is looked up",
        at="fp8refit/sources/files.py::SafetensorsFile._read_header",
        before="entry.dtype not in SAFETENSORS_DTYPES",
        after="not entry.dtype",
        found_by=FILES,
    ),
    Fault(
        name="a file that is written to while it is read is committed",
        at="fp8refit/sources/files.py::SafetensorsFile.check_unchanged",
        before="(found.st_size, found.st_mtime_ns) != self._state",
        after="found.st_size != self._state[0]",
        found_by=FILES,
    ),
    Fault(
        name="a file is opened anew for every read",
        at="fp8refit/sources/files.py::SafetensorsFile._read_bytes",
        before="count = os.preadv(self._descriptor, [to.data], where)",
        after="with open(self.path, 'rb') as anew:\n    count = os.preadv(anew.fileno(), [to.data], where)",
        found_by=FILES,
    ),
    Fault(
        name="ranks read what their driver did not judge",
        at="fp8refit/remote/rank_orders.py::RankOrders._make_source",
        before="SafetensorsSource(Path(source.path), judged=source.stamps)",
        after="SafetensorsSource(Path(source.path))",
        found_by=OPENED,
    ),
    Fault(
        name="files of one size and time are taken for the same",
        at="fp8refit/transport/stamps.py::FileStamp.is_of",
        before='{"inode", "boot"} if self.boot != other.boot else set()',
        after='{"inode", "boot"}',
        found_by=OPENED,
    ),
    Fault(
        name="ranks that opened two checkpoints in one place are not told apart",
        at="fp8refit/transport/vote.py::_judge",
        before=(
            'return InvalidSourceError([f"{path}: was replaced or changed while the ranks opened it; '
            'write each checkpoint under a new name, " "then refit again" for path in sorted(moved)])'
        ),
        after=(
            '_ = ([f"{path}: was replaced or changed while the ranks opened it; write each checkpoint '
            'under a new name, " "then refit again" for path in sorted(moved)])'
        ),
        found_by="tests/fuzz/test_files.py::test_ranks_with_drivers_of_their_own_take_one_checkpoint",
    ),
    Fault(
        name="an index that is none raises what its reader raises",
        at="fp8refit/sources/checkpoints.py::_indexed_files",
        before="(OSError, ValidationError)",
        after="OSError",
        found_by=FILES,
    ),
    Fault(
        name="a file name that is too long raises what the system raises",
        at="fp8refit/sources/checkpoints.py::_is_file",
        before="(OSError, ValueError)",
        after="ZeroDivisionError",
        found_by=FILES,
    ),
    Fault(
        name="a header that is none raises what its reader raises",
        at="fp8refit/sources/files.py::SafetensorsFile._read_header",
        before="(ValidationError, ValueError)",
        after="ZeroDivisionError",
        found_by=FILES,
    ),
    Fault(
        name="tensors of a calibration batch are read whatever they stand on",
        at="fp8refit/ranks/kv/calibration.py::_check_readable",
        before="why_unreadable(tensor)",
        after="why_unreadable(0) and None",
        found_by="tests/fuzz/test_calibration.py",
        crashes=True,
    ),
    Fault(
        name="a mask of bools is told to be integers",
        at="fp8refit/ranks/kv/calibration.py::_sequences",
        before="(*_INTEGERS, torch.bool)",
        after="_INTEGERS",
        found_by="tests/fuzz/test_calibration.py",
    ),
    Fault(
        name="a mask is taken for token ids of a wrong dtype",
        at="fp8refit/ranks/kv/calibration.py::_sequences",
        before="isinstance(batch, Tensor) and batch.dtype is torch.bool",
        after="batch is mask is not None",
        found_by="tests/fuzz/test_calibration.py",
    ),
    Fault(
        name="KV scales are taken for a mapping",
        at="fp8refit/ranks/kv/calibration.py::_scales",
        before="not isinstance(given, Mapping)",
        after="given is None",
        found_by="tests/fuzz/test_calibration.py",
    ),
    Fault(
        name="names of KV scales are taken for text",
        at="fp8refit/ranks/kv/calibration.py::_scales",
        before="(TypeError, UnicodeEncodeError)",
        after="ZeroDivisionError",
        found_by="tests/fuzz/test_calibration.py",
    ),
    Fault(
        name="a power of two is the scale that brings the largest value to 448",
        at="fp8refit/kernels/reference.py",
        before="UE8M0_MANTISSA_464 = 0x680000",
        after="UE8M0_MANTISSA_464 = 0x600000",
        found_by="tests/fuzz/test_quantizer.py",
    ),
    Fault(
        name="a block of zeros has the scale of a checkpoint where the engine quantized itself",
        at="fp8refit/kernels/reference.py::block_scales",
        before="amax.clamp(min=block_format.scale_format.amax_floor)",
        after="amax.clamp(min=1e-4 if block_format.scale_format is ScaleFormat.UE8M0 else 1e-10)",
        found_by="tests/fuzz/test_quantizer.py::test_the_specification_is_the_second_quantizer",
    ),
    Fault(
        name="the kernel divides block maxima where the engine multiplied them",
        at="fp8refit/kernels/triton_launch.py::_scale_of",
        before="amax * (1 / 448)",
        after="tl.div_rn(amax, 448.0)",
        found_by="tests/fuzz/test_quantizer.py::test_the_kernel_is_the_second_quantizer",
    ),
    Fault(
        name="an engine that quantized itself is taken for one of a checkpoint",
        at="adapters/fp8refit_vllm/compat.py::_is_online",
        before='"Online"',
        after='"Offline"',
        found_by="tests/adapters/test_vllm_layout.py tests/adapters/test_vllm_experts.py",
    ),
    Fault(
        name="a trainer quantizes for engines whose blocks of zeros have different scales",
        at="fp8refit/remote/broadcast/wire_formats.py::_Chooser._format_of",
        before="{slot.format for slot in held}",
        after="{slot.format and slot.format.block_size: slot.format for slot in held}.values()",
        found_by="tests/remote/broadcast/test_wire_formats.py",
    ),
    Fault(
        name="values are divided by their scale",
        at="fp8refit/kernels/reference.py::quantize_reference",
        before="blocks * (torch.ones_like(scale) / scale)",
        after="blocks / scale",
        found_by="tests/kernels/test_quantize.py -k test_kernel_equals_reference",
    ),
    Fault(
        name="the kernel of rows multiplies by the reciprocal of a scale",
        at="fp8refit/kernels/triton_launch.py::_code_of",
        before="tl.div_rn(x, s)",
        after="x * tl.div_rn(1.0, s)",
        found_by="tests/kernels/test_quantize.py -k divided_by_its_scale",
    ),
    Fault(
        name="a scale of a row covers only what a rank holds of it",
        at="fp8refit/live/formats.py::BlockFormat.columns_read",
        before="return first, min(-(-(start + length) // side) * side, full) - first",
        after="return start, length",
        found_by="tests/fill/test_fill.py -k 'larger_than_a_bucket or runs_of_rows'",
    ),
    Fault(
        name="a rank's columns of a row are taken from its first ones",
        at="fp8refit/kernels/triton_launch.py::_quantize_rows",
        before="source_at + (first_col + first_k) * source_col",
        after="source_at + first_k * source_col",
        found_by="tests/kernels/test_quantize.py -k read_twice",
    ),
    Fault(
        name="a row is read for its maximum up to its first tile",
        at="fp8refit/kernels/triton_launch.py::_quantize_rows",
        before="range(TILE_K, num_cols, TILE_K)",
        after="range(TILE_K, TILE_K, TILE_K)",
        found_by="tests/kernels/test_quantize.py -k read_twice",
    ),
    Fault(
        name="codes with one scale per row are taken for rows where a kernel holds columns",
        at="fp8refit/tracing/stored.py::own_tensors",
        before="values.mT",
        after="values",
        found_by="tests/tracing/test_twin.py -k one_scale_per_row",
    ),
    Fault(
        name="a proof does not look at scales that cover other ranks",
        at="fp8refit/tracing/proof.py::_are_quantized",
        before="bool((scales >= own_scales).all())",
        after="True",
        found_by="tests/tracing/test_proof.py -k scales_of_rows",
    ),
    Fault(
        name="a broadcast in BF16 sends a rank its own columns of rows with one scale",
        at="fp8refit/remote/broadcast/wire_formats.py::_Chooser._choose",
        before="cut = None",
        after="pass",
        found_by="tests/remote/broadcast/test_wire_formats.py -k whole_rows",
    ),
    Fault(
        name="what a loader takes is called skipped",
        at="fp8refit/tracing/twin.py::_skips",
        before="taken.isdisjoint(asked)",
        after="True",
        found_by=f"{TWIN} -k declared_beside",
    ),
    Fault(
        name="what a loader raises for is called skipped",
        at="fp8refit/tracing/twin.py::_skips",
        before="return False",
        after="return True",
        found_by=f"{TWIN} -k declared_beside",
    ),
    Fault(
        name="a pattern of names that no slot takes is a name",
        at="fp8refit/fill/plan.py::are_unneeded",
        before='[name for name in known if "*" in name]',
        after="[]",
        found_by=SOURCES,
    ),
    Fault(
        name="layers that draft are those of one published model",
        at="adapters/fp8refit_transformers/naming.py::declared_beside",
        before="without_numbers(stem) == stem",
        after="stem",
        found_by="tests/adapters/test_transformers_naming.py -k layers_that_draft",
    ),
    Fault(
        name="two names of one tensor are not compared before the write",
        at="fp8refit/fill/fills.py::Fills._prepare_mapping",
        before="misfits += untied(resident.plan.ties, source)",
        found_by=SECOND_NAME,
    ),
    Fault(
        name="the second name of a tensor is staged and written",
        at="fp8refit/fill/staging.py::Staging.comparing",
        before="Action.COMPARE if self.action is Action.WRITE else self.action",
        after="self.action",
        found_by=SOURCES,
    ),
    Fault(
        name="a tied tensor that differs is committed",
        at="fp8refit/ranks/write.py::Write.finish",
        before="writes and differing",
        after="not writes and differing",
        found_by=SOURCES,
    ),
    Fault(
        name="a tied tensor is compared before it is rounded",
        at="fp8refit/fill/ties.py::differ",
        before="torch.equal(bytes_of(a.to(dtype)), bytes_of(b.to(a.device, dtype)))",
        after="torch.equal(bytes_of(a.float()), bytes_of(b.to(a.device).float()))",
        found_by=SECOND_NAME,
    ),
    Fault(
        name="a broadcast does not compare what it leaves out",
        at="fp8refit/remote/broadcast/broadcast.py::Broadcast._offer",
        before="isinstance(source, RandomAccess) and (problems := untied(plan.wire.ties, source))",
        after="False and (problems := untied(plan.wire.ties, source))",
        found_by=SECOND_NAME,
    ),
    Fault(
        name="a bucket's second name is written",
        at="fp8refit/fill/from_buckets.py::ReceivedFill.take",
        before='program.table.launch(check=self._config.validate_values != "off", action=action)',
        after='program.table.launch(check=self._config.validate_values != "off")',
        found_by=SECOND_NAME,
    ),
    Fault(
        name="what came second last time is written if it comes first",
        at="fp8refit/fill/arrivals.py::Arrivals.is_second",
        before="self._came_as.setdefault(first, name)",
        after="first",
        found_by="tests/driver/test_update.py -k in_any_order",
    ),
    Fault(
        name="the drop-in commits within a call",
        at="fp8refit/driver/drop_in.py::DropIn._take",
        before="self._bucket.append((name, tensor))",
        after="self._bucket.append((name, tensor))\nif stream.is_whole:\n    self._commit()",
        found_by="tests/driver/test_drop_in.py -k differs_under_its_second_name",
    ),
    Fault(
        name="the end of a policy that comes again counts for the next",
        at="fp8refit/driver/drop_in.py::DropIn._is_served",
        before="if name == stream.last:\n    self._repeated.clear()",
        after="pass",
        found_by="tests/driver/test_drop_in.py -k expected_in_the_next_policy",
    ),
    Fault(
        name="what came again counts after a refit that failed",
        at="fp8refit/driver/drop_in.py::DropIn._begins",
        before="if not is_served:\n    self._repeated.clear()",
        after="pass",
        found_by="tests/driver/test_drop_in.py -k counts_no_more",
    ),
    Fault(
        name="what came again counts after another refit",
        at="fp8refit/driver/drop_in.py::DropIn._begin_with",
        before="set(repeated.values()) - {self._rank.target.version}",
        after="False",
        found_by="tests/driver/test_drop_in.py -k between_two_calls_counts",
    ),
    Fault(
        name="any tensor that comes again begins another policy",
        at="fp8refit/driver/drop_in.py::DropIn._start_over",
        before="if not begins_alike:\n    self._refuse(name)",
        after="pass",
        found_by="tests/driver/test_drop_in.py -k wherever_they_break_off",
    ),
    Fault(
        name="a rank that holds something else is not asked",
        at="fp8refit/ranks/rank.py::Rank.holds",
        before="all(ballot.claim == str(True) for ballot in ballots)",
        after="is_held is True",
        found_by="tests/driver/test_drop_in.py -k holds_otherwise",
    ),
    Fault(
        name="what is staged is not written before it is compared",
        at="fp8refit/ranks/target.py::Target.holds",
        before="if self._write is not None:\n    self._write.flush()",
        after="pass",
        found_by="tests/driver/test_drop_in.py -k sent_again_as_it_was",
    ),
    Fault(
        name="what was written past every loader is not looked for",
        at="fp8refit/ranks/target.py::Target.commit",
        before="self.accept()",
        found_by="tests/driver/test_drop_in.py -k one_rank_holds_otherwise",
    ),
    Fault(
        name="only the rank that was written past its loader refuses requests",
        at="fp8refit/ranks/rank.py::Rank.check_untouched",
        before='self._agreement.vote("untouched", error, config)',
        after="if error is not None:\n    raise error",
        found_by="tests/driver/test_drop_in.py -k one_rank_holds_otherwise",
    ),
    Fault(
        name="what a trainer's call has written is not looked at",
        at="adapters/fp8refit_vllm/drop_in.py::call_and_look",
        before="drop_in is not None and names_parameters(drop_in.owner)",
        after="drop_in is not None",
        found_by="tests/vllm/test_drop_in.py -k 'past_every_loader and process'",
    ),
    Fault(
        name="what a trainer has left is completed by one that drops the caches first",
        at="fp8refit/driver/drop_in.py::DropIn.cut",
        before='self._give_up("caches were dropped")\nself._stream.begin_anew()',
        after="pass",
        found_by="tests/driver/test_drop_in.py -k after_a_cut",
    ),
]
