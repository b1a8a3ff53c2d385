"""From a checked run to its parts: the few lines that every command which builds a model shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from ds_engine.config.deepspeed import precision
from ds_engine.config.schema import RunConfig
from ds_engine.errors import CheckpointError, DsEngineError
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.plan import LayerPlan
from ds_engine.training.checkpoint import files
from ds_engine.training.checkpoint.weights import FullWeights, find_weights
from ds_engine.training.run_folder import RunFolder
from launch.check import ResolvedRun
from models.common.definition import ModelDefinition, PlanOptions
from models.registry import ModelConfig, load_definition
from preprocessing.tokenize import load_tokenizer

Found = TypeVar("Found")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_dtype(deepspeed: dict[str, Any]) -> torch.dtype:
    """The dtype of weights and activations that a DeepSpeed section asks for."""
    return DTYPES[precision(deepspeed)]


def make_plan(
    run: RunConfig, model: ModelConfig, tp: TensorParallel, *, dtype: torch.dtype
) -> LayerPlan:
    """The run's model as a layer plan for one rank's tensor-parallel handle."""
    definition: ModelDefinition = load_definition(model.family)
    options = PlanOptions(
        seed=run.seed,
        isolate_documents=run.data.isolate_documents,
        label_smoothing=run.training.label_smoothing,
        z_loss=run.training.z_loss,
        dtype=dtype,
        lengths=(run.data.sequence_length, run.data.decoder_sequence_length),
    )
    return definition.plan(model, tp, options)


def plan_of(resolved: ResolvedRun, tp: TensorParallel) -> LayerPlan:
    """``make_plan`` of a checked run in its own precision."""
    return make_plan(resolved.run, resolved.model, tp, dtype=run_dtype(resolved.deepspeed))


def own_tokenizer(home: Path, named: str) -> Path:
    """The tokenizer of the run in folder ``home``: the copy that it kept, else the original.

    Args:
        home: run folder.
        named: the run's ``data.tokenizer``, a file or a folder.
    """
    kept = RunFolder(home).tokenizer
    if not kept.is_dir():
        return Path(named)
    file = kept / Path(named).name
    return file if file.is_file() else kept


def initial_weights(
    run: RunConfig, model: ModelConfig, report: Callable[[str], None]
) -> Callable[[dict[str, nn.Parameter]], None] | None:
    """What fills a new run's parameters from ``checkpoint.initialize_from``; None: nothing does.

    All ranks of the world call this, and what it returns. Rank 0 alone looks at the folders: a
    checkpoint is hashed once, and all ranks start from the same.

    Raises:
        CheckpointError: there are no usable weights; from what is returned: they are of another
            model. On all ranks alike.
    """
    source = run.checkpoint.initialize_from
    if source is None:
        return None
    checkpoint = _on_rank0(lambda: _start_of(run, Path(source), report))
    if checkpoint is None:
        return None
    definition: ModelDefinition = load_definition(model.family)

    def fill(parameters: dict[str, nn.Parameter]) -> None:
        weights = FullWeights(checkpoint)
        missing: list[str] = []
        problem: CheckpointError | None = None
        try:
            missing = weights.initialize(
                parameters, heads=definition.heads, aliases=definition.aliases
            )
        except CheckpointError as error:
            problem = error
        # A stage knows nothing of the others' parameters, and must not go on without them.
        ranks = _of_all_ranks((set(parameters), set(missing), problem))
        for _, _, problem in ranks:
            if problem is not None:
                raise problem
        weights.check_surplus(set().union(*(own for own, _, _ in ranks)), heads=definition.heads)
        new = sorted(set().union(*(absent for _, absent, _ in ranks)))
        words = f"; new, with random weights: {', '.join(new)}" if new else ""
        report(f"starting from the weights of {checkpoint}{words}")

    return fill


def _start_of(run: RunConfig, source: Path, report: Callable[[str], None]) -> Path | None:
    """The checkpoint that a run starts from; None for a run that goes on."""
    if files.checkpoints(RunFolder(Path(run.checkpoint.directory)).checkpoints):
        return None
    try:
        checkpoint = find_weights(source)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.initialize_from = {source}: {error}") from error
    warning = _other_pieces(run, checkpoint)
    if warning:
        report(f"warning: {warning}")
    return checkpoint


def _other_pieces(run: RunConfig, checkpoint: Path) -> str | None:
    """What is wrong with a tokenizer that does not number its pieces as the weights know them."""
    config = files.read_json(checkpoint / "config.json")
    named, ours = config["data"].get("tokenizer"), run.data.tokenizer
    if named is None or ours is None:
        return None
    home = checkpoint.absolute().parent.parent
    try:
        theirs = load_tokenizer(own_tokenizer(home, named)).vocabulary
    except DsEngineError:
        return None  # it is not there any more, and nothing can be said
    found = load_tokenizer(ours).vocabulary
    other = [piece for piece, number in theirs.items() if found.get(piece) != number]
    if not other:
        return None
    return (
        f"data.tokenizer = {ours} numbers {len(other)} of {len(theirs)} pieces otherwise than the "
        f"tokenizer of {checkpoint}, such as {other[0]!r}: the model will read them as other "
        f"words. Use {own_tokenizer(home, named)}, and preprocess the data with it"
    )


def _on_rank0(action: Callable[[], Found]) -> Found:
    """What rank 0 finds, or the error that it meets, on all ranks."""
    found: list[Any] = [None, None]
    alone = not dist.is_initialized()
    if alone or dist.get_rank() == 0:
        try:
            found[0] = action()
        except DsEngineError as error:
            found[1] = error
    if not alone:
        dist.broadcast_object_list(found, src=0)
    result, problem = found
    if problem is not None:
        raise problem
    return cast(Found, result)


def _of_all_ranks(value: Found) -> list[Found]:
    """Everybody's value, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
