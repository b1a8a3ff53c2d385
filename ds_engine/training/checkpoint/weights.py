"""Model weights of a checkpoint: one safetensors file per stage and tensor rank, self-describing.

Each file carries, in its metadata, every parameter's place in the whole model, so weights can be
put together for another layout (generation, evaluation, conversion) without the run they are from.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_engine.errors import CheckpointError
from ds_engine.parallel.parameter import Init, ParameterSpec, spec_of
from ds_engine.training.checkpoint import files

SPECS = "ds_engine.parameters"
PATTERN = "model-pp*-tp*.safetensors"


def file_name(pipeline: int, tensor: int) -> str:
    """Name of the file of one stage and tensor rank."""
    return f"model-pp{pipeline:02d}-tp{tensor:02d}.safetensors"


def save_weights(path: Path, weights: dict[str, Tensor], parameters: dict[str, Tensor]) -> None:
    """Write this rank's weights with their specs."""
    specs = {name: _to_json(spec_of(parameters[name])) for name in weights}
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    save_file(contiguous, path, metadata={SPECS: json.dumps(specs)})


def _to_json(spec: ParameterSpec) -> dict[str, Any]:
    return asdict(spec)


def _from_json(value: dict[str, Any]) -> ParameterSpec:
    return ParameterSpec(
        full_shape=tuple(value["full_shape"]),
        dim=value["dim"],
        rank=value["rank"],
        size=value["size"],
        init=Init(**value["init"]),
        blocks=tuple(value["blocks"]),
        valid=value["valid"],
    )


def find_weights(path: Path) -> Path:
    """``files.find`` for who wants a checkpoint's model: its optimizer state may be damaged.

    It is several times as large as the model, and is not read.

    Args:
        path: a run folder (its newest usable checkpoint is taken) or a checkpoint folder.

    Raises:
        CheckpointError: there is no usable checkpoint.
    """
    for checkpoint in files.checkpoints(path / "checkpoints"):
        with contextlib.suppress(CheckpointError):
            return files.find(checkpoint, only=_model_files(checkpoint))
    return files.find(path, only=_model_files(path) if (path / files.MANIFEST).is_file() else None)


def _model_files(checkpoint: Path) -> list[str]:
    """Names in a manifest of what describes and makes up the model."""
    manifest = files.read_json(checkpoint / files.MANIFEST)
    # One that is damaged has no names here; to say so is the part of files.verify.
    listed = manifest.get("files") if isinstance(manifest, dict) else None
    names = listed if isinstance(listed, dict) else {}
    return ["config.json", *(name for name in names if fnmatch(name, PATTERN))]


def some(names: Iterable[str]) -> str:
    """A few of many names, for a message."""
    ordered = sorted(names)
    rest = len(ordered) - 5
    return (", ".join(ordered[:5]) + (f" and {rest} more" if rest > 0 else "")) or "nothing"


class FullWeights:
    """All parameters of a checkpoint, each put together from its shards when asked for.

    One parameter is in memory at a time, so a model may be larger than the memory it is read with.

    Raises:
        CheckpointError: the folder holds no weights.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._places: dict[str, list[tuple[Path, ParameterSpec]]] = {}
        found = sorted(checkpoint.glob(PATTERN))
        if not found:
            raise CheckpointError(f"{checkpoint} holds no {PATTERN}; is it a checkpoint folder?")
        for file in found:
            with safe_open(file, "pt") as reader:
                specs = json.loads(reader.metadata()[SPECS])
            for name, value in specs.items():
                self._places.setdefault(name, []).append((file, _from_json(value)))

    def names(self) -> set[str]:
        """Canonical names of all parameters."""
        return set(self._places)

    def full(self, name: str) -> Tensor:
        """One whole parameter, vocabulary padding cut off.

        Raises:
            CheckpointError: there is no such parameter, or a shard is missing.
        """
        if name not in self._places:
            raise CheckpointError(f"the checkpoint has no parameter {name}")
        places = self._places[name]
        spec = places[0][1]
        ranks = {place.rank for _, place in places}
        if spec.sharded and len(ranks) != spec.size:
            raise CheckpointError(f"{name}: {len(ranks)} of {spec.size} shards are there")
        whole: Tensor | None = None
        for file, place in places if spec.sharded else places[:1]:
            with safe_open(file, "pt") as reader:
                part = reader.get_tensor(name)
            if whole is None:
                whole = torch.empty(spec.full_shape, dtype=part.dtype)
            place.place(part, whole)
        assert whole is not None
        return whole if spec.valid is None else whole[: spec.valid]

    @torch.no_grad()
    def load_into(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill a model's parameters in any tensor-parallel layout and dtype.

        Raises:
            CheckpointError: names or shapes do not match.
        """
        missing = set(parameters) - self.names()
        surplus = self.names() - set(parameters)
        if missing or surplus:
            raise CheckpointError(
                f"the checkpoint is of another model: it lacks {some(missing)} and has "
                f"{some(surplus)} besides"
            )
        for name, parameter in parameters.items():
            self._fill(name, parameter)

    @torch.no_grad()
    def initialize(
        self,
        parameters: Mapping[str, Tensor],
        *,
        heads: tuple[str, ...],
        aliases: Mapping[str, str],
    ) -> list[str]:
        """Start a new model from these weights, but for heads that they do not have.

        A head of another size (another number of classes) is one that they do not have.

        Args:
            parameters: this rank's, in any layout; a pipeline stage's are some of the model's.
            heads: prefixes of the parameters that may be missing and then keep their values.
            aliases: prefixes -> where else to look for a parameter.

        Returns:
            The parameters that were not found.

        Raises:
            CheckpointError: a parameter that is no head's is missing or of another shape.
        """
        missing = []
        for name, parameter in parameters.items():
            places = [name] + [
                other + name.removeprefix(prefix)
                for prefix, other in aliases.items()
                if name.startswith(prefix)
            ]
            found = next((place for place in places if place in self._places), None)
            fits = found is not None and self._shape(found) == _expected_shape(parameter)
            if found is None or (not fits and name.startswith(heads)):
                missing.append(name)
            else:
                self._fill(found, parameter)
        wrong = [name for name in missing if not name.startswith(heads)]
        if wrong:
            raise CheckpointError(
                f"the checkpoint to start from is of another model: it lacks {some(wrong)}; give "
                "checkpoint.initialize_from a run of the same model section"
            )
        return missing

    def check_surplus(self, names: Iterable[str], *, heads: tuple[str, ...]) -> None:
        """Refuse to start a model from the weights of a larger one.

        Args:
            names: of all parameters of the new model, over all stages.
            heads: as for ``initialize``; those of the checkpoint may be left out.

        Raises:
            CheckpointError: the checkpoint has other parameters besides.
        """
        surplus = [name for name in self.names() - set(names) if not name.startswith(heads)]
        if surplus:
            raise CheckpointError(
                f"the checkpoint to start from is of another model: it has {some(surplus)} "
                "besides; give checkpoint.initialize_from a run of the same model section"
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        return _whole_shape(self._places[name][0][1])

    def _fill(self, name: str, parameter: Tensor) -> None:
        shape, expected = self._shape(name), _expected_shape(parameter)
        if shape != expected:
            raise CheckpointError(
                f"{name} has shape {shape} in the checkpoint and {expected} in the model; use the "
                "model section that it was trained with"
            )
        parameter.copy_(spec_of(parameter).fit(self.full(name)))


def _expected_shape(parameter: Tensor) -> tuple[int, ...]:
    return _whole_shape(spec_of(parameter))


def _whole_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """Shape of the whole parameter without vocabulary padding."""
    return (spec.valid or spec.full_shape[0], *spec.full_shape[1:])
