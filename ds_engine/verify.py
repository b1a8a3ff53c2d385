"""The proof that a layout computes what one process computes.

``reference_trace`` trains a plan in one plain process with torch alone: autograd, clipping and
AdamW, no DeepSpeed, no process group. ``layout_trace`` trains the same plan as this world's part
of a parallel run and puts the shards together again. ``compare`` holds the two against each other:
each step's loss, gradient norm, every gradient, and every weight after the last update.

Differences of tensors are measured against the largest magnitude in the tensor, because sums taken
in another order differ by rounding of the largest terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_engine.parallel.context import ParallelContext
from ds_engine.parallel.parameter import spec_of
from ds_engine.pipeline.plan import Batch, LayerPlan
from ds_engine.pipeline.sequential import SequentialModel
from ds_engine.pipeline.targets import count_targets, weigh_targets

Tensors = dict[str, Tensor]

# Adam divides by sqrt(v) + epsilon: where the true gradient is zero (key biases, by the softmax's
# shift invariance) a tiny epsilon would blow rounding noise up to full-size updates.
PROOF_EPSILON = 1e-4


@dataclass
class Trace:
    """What a few training steps did.

    Attributes:
        losses, norms: one value a step.
        gradients: per step, full gradients by canonical name, before clipping.
        weights: full float32 weights after the last step.
        replica_faults: parameters whose copies on different ranks are not equal.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    replica_faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """One compared quantity: the largest difference over all steps, relative to its scale."""

    name: str
    step: int
    value: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether it is within the tolerance (a NaN is not)."""
        return self.value <= self.tolerance


@dataclass(frozen=True)
class AdamSettings:
    """The optimizer of both sides of a proof."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0

    def deepspeed_optimizer(self) -> dict[str, Any]:
        """The same optimizer as DeepSpeed JSON."""
        return {
            "type": "AdamW",
            "params": {
                "lr": self.learning_rate,
                "betas": list(self.betas),
                "eps": PROOF_EPSILON,
                "weight_decay": self.weight_decay,
                "torch_adam": True,
            },
        }


def reference_trace(plan: LayerPlan, steps: Sequence[Sequence[Batch]], adam: AdamSettings) -> Trace:
    """Train in this process alone.

    Args:
        plan: made with ``TensorParallel.single()``.
        steps: for each step, all micro-batches of the global batch.
        adam: optimizer settings.
    """
    model = SequentialModel(plan).train()
    parameters = model.canonical_parameters()
    decayed = [p for p in parameters.values() if p.ndim > 1]
    rest = [p for p in parameters.values() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=adam.learning_rate,
        betas=adam.betas,
        eps=PROOF_EPSILON,
        weight_decay=adam.weight_decay,
    )
    trace = Trace()
    for batches in steps:
        counts = count_targets([targets for _, targets in batches]).tolist()
        scales = [1 / max(count, 1.0) for count in counts]
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in batches:
            loss = model(inputs, weigh_targets(targets, scales))
            loss.backward()
            total += float(loss.detach())
        gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        if adam.clip and norm > adam.clip:
            for p in parameters.values():
                if p.grad is not None:
                    p.grad.mul_(adam.clip / (norm + 1e-6))
        optimizer.step()
        trace.losses.append(total)
        trace.norms.append(float(norm))
        trace.gradients.append(gradients)
    trace.weights = {n: p.detach().clone() for n, p in parameters.items()}
    return trace


def gather_full(
    local: Tensors, parameters: dict[str, Tensor], context: ParallelContext
) -> tuple[Tensors, list[str]]:
    """Put shards together on rank 0; all ranks must call.

    Args:
        local: this rank's part of a quantity (weights, gradients) by canonical name.
        parameters: the parameters with their specs.

    Returns:
        Full tensors (empty but on rank 0), and names whose copies differ between ranks that should
        hold the same.
    """
    part = {name: (spec_of(parameters[name]), value.float().cpu()) for name, value in local.items()}
    world = context.dims.world
    parts: list[Any] = [part]
    if world > 1:
        parts = [None] * world if context.rank == 0 else []
        dist.gather_object(part, parts if context.rank == 0 else None, dst=0)
    full: Tensors = {}
    seen: dict[tuple[str, int], Tensor] = {}
    faults: list[str] = []
    for each in parts:
        for name, (spec, value) in each.items():
            key = (name, spec.rank if spec.sharded else 0)
            if key in seen:
                if not torch.equal(seen[key], value) and name not in faults:
                    faults.append(name)
                continue
            seen[key] = value
            if name not in full:
                full[name] = torch.full(spec.full_shape, float("nan"))
            spec.place(value, full[name])
    return full, faults


def layout_trace(
    step: Any,
    batches: Callable[[int], Sequence[Batch] | None],
    num_steps: int,
    adam: AdamSettings,
    *,
    full_gradient: Callable[[Tensor], Tensor | None],
    full_weight: Callable[[Tensor], Tensor | None],
) -> Trace:
    """Train as one rank of a parallel run; the trace is complete on rank 0.

    Args:
        step: a ``TrainStep``.
        batches: this replica's micro-batches of a step.
        full_gradient, full_weight: give the float32 value of a parameter on this rank, collecting
            it from the ZeRO partitions.
    """
    context = step.context
    parameters = step.module.canonical_parameters()
    trace = Trace()

    def before_update() -> None:
        found = {name: full_gradient(p) for name, p in parameters.items()}
        local = {name: g for name, g in found.items() if g is not None}
        full, faults = gather_full(local, parameters, context)
        trace.gradients.append(full)
        trace.replica_faults += [f"gradient of {name}" for name in faults]

    step.engine.before_update = before_update
    for number in range(num_steps):
        result = step.train_batch(batches(number), adam.learning_rate)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    found = {name: full_weight(p) for name, p in parameters.items()}
    local = {name: w for name, w in found.items() if w is not None}
    trace.weights, faults = gather_full(local, parameters, context)
    trace.replica_faults += [f"weight of {name}" for name in faults]
    return trace


def _largest(ours: Tensor, theirs: Tensor, reach: float = 0.0) -> float:
    """Largest difference over the largest magnitude: rounding in another order stays small."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(max(reach, 1e-8)))


def _overall(ours: Tensor, theirs: Tensor, reach: float = 0.0) -> float:
    """Length of the difference over the length of the tensor: for coarse number formats."""
    floor = max(reach * theirs.numel() ** 0.5, 1e-8)
    return float((ours - theirs).norm() / theirs.norm().clamp_min(floor))


MEASURES = {"largest": _largest, "overall": _overall}


def _valid_rows(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Cut vocabulary padding, which differs between layouts and holds zeros."""
    rows = min(ours.shape[0], theirs.shape[0])
    for longer in (ours, theirs):
        if longer.shape[0] > rows and longer[rows:].abs().max() != 0:
            return ours.new_tensor([float("nan")]), theirs.new_ones(1)
    return ours[:rows], theirs[:rows]


def compare(
    ours: Trace,
    reference: Trace,
    *,
    tolerance: float,
    scalar_tolerance: float | None = None,
    measure: str = "largest",
    reach: float = 0.0,
) -> list[Difference]:
    """All differences, in the order of the model; see ``Difference.equal``.

    Args:
        tolerance: for tensors, by ``measure``.
        scalar_tolerance: for losses and norms, relative; default the same.
        measure: ``largest`` or ``overall``.
        reach: how far the optimizer can have moved one weight; smaller weights (biases that start
            at zero) are measured against it. For coarse formats, where the direction of Adam's
            step is noise wherever the gradient is.
    """
    relative = MEASURES[measure]
    scalar = tolerance if scalar_tolerance is None else scalar_tolerance
    rows = []
    for name, a, b in (
        ("loss", ours.losses, reference.losses),
        ("gradient norm", ours.norms, reference.norms),
    ):
        values = [abs(x - y) / max(abs(y), 1e-8) for x, y in zip(a, b, strict=True)]
        rows.append(_worst(name, values, scalar))
    for name in reference.weights:
        # In a coarse format, where terms cancel in one step only their rounding is left: it is held
        # against the gradient's usual size.
        usual = _usual_size(reference, name) if measure == "overall" else 0.0
        values = []
        for found, expected in zip(ours.gradients, reference.gradients, strict=True):
            if name in found and name in expected:
                values.append(relative(*_valid_rows(found[name], expected[name]), usual))
            else:
                values.append(float("nan") if (name in found) != (name in expected) else 0.0)
        # A gradient that is zero in theory is rounding noise in both: hold it against the norm.
        values = [
            v if not _is_noise(reference, i, name) else v * _noise_scale(reference, i, name)
            for i, v in enumerate(values)
        ]
        rows.append(_worst(f"gradient of {name}", values, tolerance))
    for name, theirs in reference.weights.items():
        value = (
            relative(*_valid_rows(ours.weights[name], theirs), reach)
            if name in ours.weights
            else float("nan")
        )
        rows.append(_worst(f"weight of {name}", [value], tolerance))
    rows += [Difference(f"copies: {name}", 0, float("inf"), 0.0) for name in ours.replica_faults]
    return rows


def _usual_size(reference: Trace, name: str) -> float:
    """Root mean square of a gradient in the step where it is largest."""
    found = [step[name] for step in reference.gradients if name in step]
    return max((float(g.norm()) / g.numel() ** 0.5 for g in found), default=0.0)


NOISE = 1e-6


def _is_noise(reference: Trace, step: int, name: str) -> bool:
    gradient = reference.gradients[step].get(name)
    return gradient is not None and float(gradient.abs().max()) < NOISE * reference.norms[step]


def _noise_scale(reference: Trace, step: int, name: str) -> float:
    return float(reference.gradients[step][name].abs().max()) / max(reference.norms[step], 1e-8)


def _worst(name: str, values: list[float], tolerance: float) -> Difference:
    # NaN must win over every number: it is the worst there is.
    index = max(
        range(len(values)), key=lambda i: float("inf") if values[i] != values[i] else values[i]
    )
    return Difference(name, index, values[index], tolerance)
