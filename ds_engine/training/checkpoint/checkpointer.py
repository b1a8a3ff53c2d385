"""Saving and resuming a run in the layout that it runs in, equal to the last bit in float32.

A checkpoint ``step_00000100`` holds

=====================================  ==========================================================
``manifest.json``                      size and SHA-256 of every other file
``state.json``                         ``TrainState``, layout, precision, versions
``config.json``                        the resolved run
``model-ppPP-tpTT.safetensors``        weights of a stage and tensor rank (``weights``)
``optimizer-ppPP-tpTT-dpDD…``          named pieces of masters and optimizer state (``fragments``)
=====================================  ==========================================================

No file needs pickle to be read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_engine.errors import CheckpointError
from ds_engine.training.checkpoint import files, weights
from ds_engine.training.checkpoint.fragments import (
    finish_restore,
    locate,
    optimizer_state,
    partition_sharded,
    restore_master,
    restore_state,
)
from ds_engine.training.state import TrainState

PIECES = "ds_engine.pieces"
MASTER = "master"
SEPARATOR = "//"
Report = Callable[[str], None]


class Checkpointer:
    """Reads and writes the checkpoints of one run; every rank of the world owns one.

    Args:
        root: folder of the checkpoints, on a file system that all ranks share.
        step: the ``TrainStep`` whose weights and optimizer are saved.
        config: the resolved run as JSON values.
        keep_last: complete checkpoints to keep; None keeps all.
        report: called on rank 0 with one line for people.
        gather: ``gather(parameter)`` returns the whole weight that ZeRO-3 has cut.
    """

    def __init__(
        self,
        root: Path,
        step: Any,
        *,
        config: dict[str, Any],
        keep_last: int | None,
        report: Report,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        self.root, self.step, self.config = root, step, config
        self.keep_last, self.report, self.gather = keep_last, report, gather
        self.context = step.context
        self.parameters = step.module.canonical_parameters()
        place = self.context.coordinates
        self.pipeline, self.tensor = place["pipeline"], place["tensor"]
        self.replica = self.context.get_data_parallel_rank()

    # -- saving -----------------------------------------------------------------------------
    def save(self, state: TrainState) -> Path:
        """Write a checkpoint; all ranks call this at the same step.

        Raises:
            CheckpointError: on every rank, when any rank could not write.
        """
        self._on_rank0(lambda: files.prepare(self.root, state.step))
        temporary = files.temporary_folder(self.root, state.step)
        written, problem = self._try(lambda: self._write(temporary))
        results = self._gather((written, problem))

        def finish() -> None:
            problems = [text for _, text in results if text]
            if problems:
                raise CheckpointError("; ".join(problems))
            entries: dict[str, Any] = {}
            for found, _ in results:
                entries |= found
            for name, value in (("state.json", self._header(state)), ("config.json", self.config)):
                files.write_json(temporary / name, value)
                entries[name] = files.describe_file(temporary / name)
            files.commit(self.root, state.step, entries)
            files.keep_newest(self.root, self.keep_last, saved=state.step)

        self._on_rank0(finish)
        return self.root / files.folder_name(state.step)

    def _write(self, folder: Path) -> dict[str, Any]:
        written = {}
        partitioned = any(partition_sharded(p) for p in self.parameters.values())
        if partitioned or self.replica == 0:
            values = {}
            for name, parameter in self.parameters.items():
                whole = self.gather(parameter) if partitioned else parameter.detach()
                if self.replica == 0:
                    values[name] = whole.cpu()
            if self.replica == 0:
                name = weights.file_name(self.pipeline, self.tensor)
                weights.save_weights(folder / name, values, self.parameters)
                written[name] = files.describe_file(folder / name)
        name = self._optimizer_file()
        if name is not None:
            self._write_pieces(folder / name)
            written[name] = files.describe_file(folder / name)
        return written

    def _optimizer_file(self, *, reading: bool = False) -> str | None:
        """This rank's file; without ZeRO all replicas hold the same, and the first one writes."""
        zero = self.step.engine.zero_optimization_stage() > 0
        replica = self.replica if zero else 0
        if not zero and self.replica and not reading:
            return None
        return f"optimizer-pp{self.pipeline:02d}-tp{self.tensor:02d}-dp{replica:03d}.safetensors"

    def _write_pieces(self, path: Path) -> None:
        tensors, pieces = {}, {}
        for name, parameter in self.parameters.items():
            place = locate(self.step.engine, parameter)
            if place is None:
                continue
            pieces[name] = [place.start, place.length]
            if not place.is_parameter:
                tensors[f"{name}{SEPARATOR}{MASTER}"] = place.view(place.flat).cpu().clone()
            for key, value in optimizer_state(self.step.engine, place).items():
                tensors[f"{name}{SEPARATOR}{key}"] = value.cpu().clone()
        save_file(tensors, path, metadata={PIECES: json.dumps(pieces)})

    def _header(self, state: TrainState) -> dict[str, Any]:
        return {
            "train": state.to_json(),
            "layout": self._layout(),
            "loss_scaler": _loss_scaler(self.step.engine),
            "versions": {"torch": str(torch.__version__)},
        }

    def _layout(self) -> dict[str, Any]:
        dims, engine = self.context.dims, self.step.engine
        precision = "fp16" if engine.fp16_enabled() else "fp32"
        return {
            "tensor": dims.tensor,
            "pipeline": dims.pipeline,
            "data": dims.data,
            "context": dims.context,
            "zero": engine.zero_optimization_stage(),
            "precision": "bf16" if engine.bfloat16_enabled() else precision,
            "optimizer": type(engine.basic_optimizer).__name__,
        }

    # -- resuming ---------------------------------------------------------------------------
    def resume(self) -> TrainState | None:
        """Load the newest complete checkpoint; None when there is none.

        Raises:
            CheckpointError: all are damaged, or the newest one has another layout.
        """
        path = self._choose()
        if path is None:
            return None
        header = files.read_json(path / "state.json")
        ours, theirs = self._layout(), header["layout"]
        different = [f"{k} {theirs.get(k)} -> {v}" for k, v in ours.items() if v != theirs.get(k)]
        if different:
            raise CheckpointError(
                f"{path} was saved in another layout ({', '.join(different)}); resume with "
                "the layout that it was saved with, or set another checkpoint.directory"
            )
        changed = differing_keys(files.read_json(path / "config.json"), self.config)
        if changed:
            raise CheckpointError(
                f"{path} is of another model or data order: {', '.join(changed)}; restore these "
                "values to resume, or start anew in another checkpoint.directory"
            )
        _, problem = self._try(lambda: self._read(path))
        problems = [text for text in self._gather(problem) if text]
        self._on_rank0(lambda: _raise_first(problems))
        state = TrainState.from_json(header["train"])
        self._restore_engine(state, header["loss_scaler"])
        self.report(f"resumed from {path.name}")
        return state

    def _choose(self) -> Path | None:
        """The newest undamaged checkpoint, the same on all ranks; None when there is none.

        Rank 0 looks at names and sizes, each rank hashes the files that it will read, at once.
        """
        names: list[Any] = [[]]

        def listing() -> None:
            files.recover(self.root)
            names[0] = [path.name for path in files.checkpoints(self.root)]

        self._on_rank0(listing)
        self._share(names)
        told = []
        for name in names[0]:
            path = self.root / name
            _, problem = self._try(functools.partial(self._inspect, path))
            shared = [[text for text in self._gather(problem) if text]]
            self._share(shared)
            if not shared[0]:
                return path
            told.append(f"{name} is not usable: {shared[0][0]}")
            self.report(told[-1])
        if told:
            raise CheckpointError(
                f"no usable checkpoint in {self.root}: {'; '.join(told)}. Remove the folder to "
                "start again from step 0"
            )
        return None

    def _inspect(self, path: Path) -> dict[str, Any]:
        if self.context.rank == 0:
            files.verify(path, hashes=False)
        own = [weights.file_name(self.pipeline, self.tensor), self._optimizer_file(reading=True)]
        small = ["state.json", "config.json"] if self.context.rank == 0 else []
        # What is missing here belongs to another layout, which resume() explains.
        files.verify(path, only=[name for name in [*own, *small] if name is not None])
        return {}

    def _share(self, values: list[Any]) -> None:
        """Rank 0's values replace everybody's."""
        if self.context.dims.world > 1:
            dist.broadcast_object_list(values, src=0)

    @torch.no_grad()
    def _read(self, path: Path) -> dict[str, Any]:
        engine = self.step.engine
        name = weights.file_name(self.pipeline, self.tensor)
        with safe_open(path / name, "pt") as reader:
            _check_names(path / name, set(reader.keys()), set(self.parameters))
            for key, parameter in self.parameters.items():
                found = tuple(reader.get_slice(key).get_shape())
                _check_shape(path / name, key, found, parameter)
                if not partition_sharded(parameter):
                    parameter.copy_(reader.get_tensor(key))
        pieces_file = self._optimizer_file(reading=True)
        assert pieces_file is not None
        with safe_open(path / pieces_file, "pt") as reader:
            pieces = json.loads(reader.metadata()[PIECES])
            places = {name: locate(engine, p) for name, p in self.parameters.items()}
            ours = {n: [p.start, p.length] for n, p in places.items() if p is not None}
            if pieces != ours:
                raise CheckpointError(
                    f"{path / pieces_file}: parameters are cut in another way here; resume with "
                    "the same DeepSpeed version and zero_optimization settings"
                )
            for full_name in reader.keys():  # noqa: SIM118 - not a mapping
                key, _, kind = full_name.partition(SEPARATOR)
                place = places[key]
                assert place is not None
                value = reader.get_tensor(full_name)
                if kind == MASTER:
                    restore_master(self.parameters[key], place, value)
                else:
                    restore_state(engine, place, kind, value)
        finish_restore(engine)
        return {}

    def _restore_engine(self, state: TrainState, loss_scaler: dict[str, float]) -> None:
        engine = self.step.engine
        engine.global_steps = state.step
        engine.global_samples = state.consumed_samples
        engine.skipped_steps = state.skipped_steps
        for key, value in loss_scaler.items():
            setattr(engine.optimizer.loss_scaler, key, value)

    # -- agreement between ranks --------------------------------------------------------------
    def _try(self, action: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], str]:
        # Whatever goes wrong on one rank (safetensors raises its own class for a full disk) must
        # reach the others, which would wait for this one for ever.
        try:
            return action(), ""
        except CheckpointError as error:
            return {}, str(error)
        except Exception as error:
            return {}, f"rank {self.context.rank}: {type(error).__name__}: {error}"

    def _gather(self, value: Any) -> list[Any]:
        if self.context.dims.world == 1:
            return [value]
        values: list[Any] | None = None
        if self.context.rank == 0:
            values = [None] * self.context.dims.world
        dist.gather_object(value, values, dst=0)
        return values or []

    def _on_rank0(self, action: Callable[[], Any]) -> None:
        """Run on rank 0; its error becomes every rank's, so that none goes on alone."""
        problem: list[Any] = [""]
        if self.context.rank == 0:
            _, problem[0] = self._try(lambda: action() or {})
        self._share(problem)
        if problem[0]:
            raise CheckpointError(problem[0])


# What may change between two starts of one run: it moves no parameter and no sample.
FREE_TO_CHANGE = (
    *("backend", "dropout", "embedding_dropout", "hidden_dropout"),
    *("init_std", "scaled_output_init"),
)


def differing_keys(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """``key saved -> ours`` for everything that makes it another model or another order of data.

    Args:
        saved: the resolved run of a checkpoint; ours: of the run that wants to resume from it.
    """

    def fixed(run: Mapping[str, Any]) -> dict[str, Any]:
        data = run.get("data", {})
        values = {"seed": run.get("seed"), **_flat(run.get("model", {}), "model")}
        for key in ("sequence_length", "isolate_documents"):
            values[f"data.{key}"] = data.get(key)
        return {k: v for k, v in values.items() if k.rpartition(".")[2] not in FREE_TO_CHANGE}

    before, now = fixed(saved), fixed(ours)
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]


def _flat(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{where}.{key}"
        flat |= _flat(value, name) if isinstance(value, Mapping) else {name: value}
    return flat


def _raise_first(problems: list[str]) -> None:
    if problems:
        raise CheckpointError("; ".join(problems))


def _check_names(path: Path, found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{path} is of another model: it lacks {weights.some(wanted - found)} and has "
            f"{weights.some(found - wanted)} besides; resume with the model section that it was "
            "trained with"
        )


def _check_shape(path: Path, name: str, found: tuple[int, ...], parameter: Tensor) -> None:
    wanted = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 empties the tensor
    if found != wanted:
        raise CheckpointError(
            f"{path} is of another model: {name} has shape {found} there and {wanted} here; resume "
            "with the model section that it was trained with"
        )


def _loss_scaler(engine: Any) -> dict[str, float]:
    """Numbers of fp16's dynamic loss scaler; empty in other precisions."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not engine.fp16_enabled() or scaler is None:
        return {}
    return {k: v for k, v in vars(scaler).items() if isinstance(v, (int, float))}
