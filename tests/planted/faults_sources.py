"""Faults in how sources are judged and read."""

from tests.planted.fault import Fault

SOURCES = "tests/fuzz/test_sources.py::TestSources"
AFTER_GOOD = "tests/fuzz/test_sources.py::test_no_bad_tensor_passes_after_good_ones"
ANNOUNCED = "tests/fuzz/test_sources.py::test_no_bad_tensor_passes_for_what_was_announced"
FILES = "tests/fuzz/test_files.py"
SECOND_NAME = "tests/fuzz/test_sources.py::test_the_second_name_of_a_tied_tensor_is_compared"
TWIN = "tests/live/tracing/test_twin.py"
OPENED = "tests/fuzz/test_files.py::test_an_engine_opens_what_was_judged"

FAULTS = [
    Fault(
        name="a tensor is taken whatever it stands on",
        path="fp8refit/live/storage.py",
        before="        and has_memory(tensor)\n    ):",
        after="    ):",
        found_by=AFTER_GOOD,
        crashes=True,
    ),
    Fault(
        name="a subclass is taken whatever it stands on",
        path="fp8refit/live/storage.py",
        before="    if _is_fake(tensor) or not has_memory(tensor):\n",
        after="    if not isinstance(tensor, Tensor):\n",
        found_by=AFTER_GOOD,
        crashes=True,
    ),
    Fault(
        name="a view with the other sign is taken",
        path="fp8refit/live/storage.py",
        before="        and not (tensor.is_meta or tensor.is_nested or tensor.is_neg())\n",
        after="        and not (tensor.is_meta or tensor.is_nested)\n",
        found_by=AFTER_GOOD,
    ),
    Fault(
        name="memory of a source that is recognised is not looked at",
        path="fp8refit/live/layout_guard.py",
        before="        if not all(has_memory(",
        after="        if False and not all(has_memory(",
        found_by=AFTER_GOOD,
        crashes=True,
    ),
    Fault(
        name="a nested tensor is asked for its strides",
        path="fp8refit/live/layout_guard.py",
        before='any(map(getattr, tensors, repeat("is_nested"), repeat(True))) or ',
        after="",
        found_by=AFTER_GOOD,
        crashes=True,
    ),
    Fault(
        name="what a function returns is taken for an iterable",
        path="fp8refit/sources/pairs.py",
        before="    if not isinstance(items, Iterable) or isinstance(items, Tensor):\n",
        after="    if items is items and False:\n",
        found_by=SOURCES,
    ),
    Fault(
        name="a name that is no text is taken",
        path="fp8refit/live/names.py",
        before="    name.encode()\n",
        after="",
        found_by="tests/sources/test_source.py",
    ),
    Fault(
        name="a broadcast takes another dtype than was announced",
        path="fp8refit/remote/broadcast/source_reader.py",
        before="                if came != announced:\n",
        after="                if came.shape != announced.shape:\n",
        found_by=ANNOUNCED,
    ),
    Fault(
        name="a broadcast in another order is sent as the last one was announced",
        path="fp8refit/remote/broadcast/broadcast.py",
        before="        made_for = said, list(said.metadata), config,",
        after="        made_for = said, sorted(said.metadata), config,",
        found_by="tests/fuzz/test_sources.py::test_a_broadcast_may_come_in_any_order",
    ),
    Fault(
        name="a dtype that cannot be sent is met while it is sent",
        path="fp8refit/remote/source_summary.py",
        before="    odd = unsendable(metadata)\n",
        after="    odd = unsendable({})\n",
        found_by=AFTER_GOOD,
    ),
    Fault(
        name="every expert of a saved checkpoint is told to be left out",
        path="fp8refit/fill/plan.py",
        before="        elif stacked := self._held_stacked(name):\n",
        after="        elif stacked := self._held_stacked(name)[:0]:\n",
        found_by="tests/fuzz/test_sources.py::test_a_saved_mixture_of_experts_is_told_in_one_line",
    ),
    Fault(
        name="quantize narrows dtypes that it does not know to bytes",
        path="fp8refit/checkpoint/outputs.py",
        before="torch.bfloat16 if is_rounded else meta.dtype)\n",
        after="torch.bfloat16 if is_rounded else meta.dtype if meta.dtype.itemsize > 2 else torch.uint8)\n",
        found_by=FILES,
    ),
    Fault(
        name="files announce bytes for dtypes that they do not know",
        path="fp8refit/sources/checkpoints.py",
        before="        self.metadata = {name: TensorMeta.of(tensor.meta) for name, tensor in self.stored.items()}\n",
        after=(
            "        self.metadata = {\n"
            "            name: TensorMeta(\n"
            "                shape=tuple(tensor.meta.shape),\n"
            "                dtype=torch.uint8 if tensor.meta.dtype is torch.int16 else tensor.meta.dtype,\n"
            "            )\n"
            "            for name, tensor in self.stored.items()\n"
            "        }\n"
        ),
        found_by=FILES,
    ),
    Fault(
        name="a dtype that no file may hold is looked up",
        path="fp8refit/sources/files.py",
        before="            if entry.dtype not in SAFETENSORS_DTYPES\n",
        after="            if not entry.dtype\n",
        found_by=FILES,
    ),
    Fault(
        name="a file that is written to while it is read is committed",
        path="fp8refit/sources/files.py",
        before="        if (found.st_size, found.st_mtime_ns) != self._state:\n",
        after="        if found.st_size != self._state[0]:\n",
        found_by=FILES,
    ),
    Fault(
        name="a file is opened anew for every read",
        path="fp8refit/sources/files.py",
        before="                count = os.preadv(self._descriptor, [to.data], where)\n",
        after=(
            "                with open(self.path, 'rb') as anew:\n"
            "                    count = os.preadv(anew.fileno(), [to.data], where)\n"
        ),
        found_by=FILES,
    ),
    Fault(
        name="ranks read what their driver did not judge",
        path="fp8refit/remote/rank_orders.py",
        before="SafetensorsSource(Path(source.path), judged=source.stamps)",
        after="SafetensorsSource(Path(source.path))",
        found_by=OPENED,
    ),
    Fault(
        name="files of one size and time are taken for the same",
        path="fp8refit/sources/stamps.py",
        before='        told_apart = {"inode", "boot"} if self.boot != other.boot else set()\n',
        after='        told_apart = {"inode", "boot"}\n',
        found_by=OPENED,
    ),
    Fault(
        name="ranks that opened two checkpoints in one place are not told apart",
        path="fp8refit/transport/vote.py",
        before='        return InvalidSourceError(\n            [\n                f"{path}: was replaced',
        after='        _ = (\n            [\n                f"{path}: was replaced',
        found_by="tests/fuzz/test_files.py::test_ranks_with_drivers_of_their_own_take_one_checkpoint",
    ),
    Fault(
        name="an index that is none raises what its reader raises",
        path="fp8refit/sources/checkpoints.py",
        before="    except (OSError, ValidationError) as error:\n",
        after="    except OSError as error:\n",
        found_by=FILES,
    ),
    Fault(
        name="a file name that is too long raises what the system raises",
        path="fp8refit/sources/checkpoints.py",
        before="    except (OSError, ValueError):  # not a possible file name\n",
        after="    except ZeroDivisionError:\n",
        found_by=FILES,
    ),
    Fault(
        name="a header that is none raises what its reader raises",
        path="fp8refit/sources/files.py",
        before="        except (ValidationError, ValueError) as error:\n",
        after="        except ZeroDivisionError as error:\n",
        found_by=FILES,
    ),
    Fault(
        name="tensors of a calibration batch are read whatever they stand on",
        path="fp8refit/ranks/kv/calibration.py",
        before="    if problem := why_unreadable(tensor):\n",
        after="    if problem := why_unreadable(0) and None:\n",
        found_by="tests/fuzz/test_calibration.py",
        crashes=True,
    ),
    Fault(
        name="a mask of bools is told to be integers",
        path="fp8refit/ranks/kv/calibration.py",
        before="        masks = _rows(mask, (*_INTEGERS, torch.bool), ",
        after="        masks = _rows(mask, _INTEGERS, ",
        found_by="tests/fuzz/test_calibration.py",
    ),
    Fault(
        name="a mask is taken for token ids of a wrong dtype",
        path="fp8refit/ranks/kv/calibration.py",
        before="    if isinstance(batch, Tensor) and batch.dtype is torch.bool:\n",
        after="    if batch is mask is not None:\n",
        found_by="tests/fuzz/test_calibration.py",
    ),
    Fault(
        name="KV scales are taken for a mapping",
        path="fp8refit/ranks/kv/calibration.py",
        before="    if not isinstance(given, Mapping):\n",
        after="    if given is None:\n",
        found_by="tests/fuzz/test_calibration.py",
    ),
    Fault(
        name="names of KV scales are taken for text",
        path="fp8refit/ranks/kv/calibration.py",
        before="        except (TypeError, UnicodeEncodeError):\n",
        after="        except ZeroDivisionError:\n",
        found_by="tests/fuzz/test_calibration.py",
    ),
    Fault(
        name="a power of two is the scale that brings the largest value to 448",
        path="fp8refit/fill/kernels/reference.py",
        before="UE8M0_MANTISSA_464 = 0x680000\n",
        after="UE8M0_MANTISSA_464 = 0x600000\n",
        found_by="tests/fuzz/test_quantizer.py",
    ),
    Fault(
        name="a block of zeros has the scale of a checkpoint where the engine quantized itself",
        path="fp8refit/fill/kernels/reference.py",
        before="    amax = amax.clamp(min=scale_format.amax_floor)\n",
        after="    amax = amax.clamp(min=1e-4 if scale_format is ScaleFormat.UE8M0 else 1e-10)\n",
        found_by="tests/fuzz/test_quantizer.py::test_the_specification_is_the_second_quantizer",
    ),
    Fault(
        name="the kernel divides block maxima where the engine multiplied them",
        path="fp8refit/fill/kernels/triton_launch.py",
        before="            s = amax * (1 / 448)\n",
        after="            s = tl.div_rn(amax, 448.0)\n",
        found_by="tests/fuzz/test_quantizer.py::test_the_kernel_is_the_second_quantizer",
    ),
    Fault(
        name="an engine that quantized itself is taken for one of a checkpoint",
        path="adapters/fp8refit_vllm/compat.py",
        before='.startswith("Fp8PerBlockOnline")',
        after='.startswith("Fp8PerBlockOffline")',
        found_by="tests/adapters/test_vllm_layout.py tests/adapters/test_vllm_experts.py",
    ),
    Fault(
        name="a trainer quantizes for engines whose blocks of zeros have different scales",
        path="fp8refit/remote/broadcast/wire_formats.py",
        before="        formats = {(slot.block_size, slot.scale_format) for slot in held}\n",
        after="        formats = {slot.block_size: (slot.block_size, slot.scale_format) for slot in held}.values()\n",
        found_by="tests/remote/broadcast/test_wire_formats.py",
    ),
    Fault(
        name="values are divided by their scale",
        path="fp8refit/fill/kernels/reference.py",
        before="    codes = (blocks * inverse).clamp(",
        after="    codes = (blocks / scale).clamp(",
        found_by="tests/fill/kernels/test_quantize.py -k test_kernel_equals_reference",
    ),
    Fault(
        name="what a loader takes is called skipped",
        path="fp8refit/live/tracing/twin.py",
        before="    return taken.isdisjoint(asked)\n",
        after="    return True\n",
        found_by=f"{TWIN} -k declared_beside",
    ),
    Fault(
        name="what a loader raises for is called skipped",
        path="fp8refit/live/tracing/twin.py",
        before="        return False\n    taken = ",
        after="        return True\n    taken = ",
        found_by=f"{TWIN} -k declared_beside",
    ),
    Fault(
        name="a pattern of names that no slot takes is a name",
        path="fp8refit/fill/plan.py",
        before='    is_like = is_any_of([name for name in known if "*" in name])\n',
        after="    is_like = is_any_of([])\n",
        found_by=SOURCES,
    ),
    Fault(
        name="layers that draft are those of one published model",
        path="adapters/fp8refit_transformers/naming.py",
        before="and without_numbers(stem) == stem:",
        after="and stem:",
        found_by="tests/adapters/test_transformers_naming.py -k layers_that_draft",
    ),
    Fault(
        name="two names of one tensor are not compared before the write",
        path="fp8refit/fill/fills.py",
        before="        misfits += untied(resident.plan.ties, source)\n",
        after="",
        found_by=SECOND_NAME,
    ),
    Fault(
        name="the second name of a tensor is staged and written",
        path="fp8refit/fill/staging.py",
        before="Action.COMPARE if self.action is Action.WRITE else self.action",
        after="self.action",
        found_by=SOURCES,
    ),
    Fault(
        name="a tied tensor that differs is committed",
        path="fp8refit/ranks/write.py",
        before="        if writes and differing:\n",
        after="        if not writes and differing:\n",
        found_by=SOURCES,
    ),
    Fault(
        name="a tied tensor is compared before it is rounded",
        path="fp8refit/fill/ties.py",
        before="bytes_of(a.to(dtype)), bytes_of(b.to(a.device, dtype))",
        after="bytes_of(a.float()), bytes_of(b.to(a.device).float())",
        found_by=SECOND_NAME,
    ),
    Fault(
        name="a broadcast does not compare what it leaves out",
        path="fp8refit/remote/broadcast/broadcast.py",
        before="        if isinstance(source, RandomAccess) and (problems := untied(plan.wire.ties, source)):\n",
        after="        if False and (problems := untied(plan.wire.ties, source)):\n",
        found_by=SECOND_NAME,
    ),
    Fault(
        name="a bucket's second name is written",
        path="fp8refit/fill/from_buckets.py",
        before='            program.table.launch(check=self._config.validate_values != "off", action=action)\n',
        after='            program.table.launch(check=self._config.validate_values != "off")\n',
        found_by=SECOND_NAME,
    ),
    Fault(
        name="what came second last time is written if it comes first",
        path="fp8refit/fill/arrivals.py",
        before="        return first is not None and self._came_as.setdefault(first, name) != name\n",
        after="        return first is not None and first != name\n",
        found_by="tests/driver/test_update.py -k in_any_order",
    ),
    Fault(
        name="the drop-in commits within a call",
        path="fp8refit/driver/drop_in.py",
        before="        self._bucket.append((name, tensor))\n",
        after="        self._bucket.append((name, tensor))\n        if stream.is_whole:\n            self._commit()\n",
        found_by="tests/driver/test_drop_in.py -k differs_under_its_second_name",
    ),
]
