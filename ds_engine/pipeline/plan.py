"""A model as a flat list of layers: the one description that every engine builds from.

The same ``LayerPlan`` becomes a DeepSpeed pipeline stage or a plain sequential module. A layer is
called as ``layer(state, context)``: ``state`` is a NamedTuple of tensors that may cross a stage
boundary, ``context`` holds what each stage derives once per micro-batch for all its layers
(attention masks, rotary tables) and what only one end of the model needs (labels, caches).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

State = tuple[Tensor, ...]
# (the first layer's inputs, (labels, loss mask or token weights)) of one micro-batch
Batch = tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]


class Layer(Protocol):
    """What a plan is made of."""

    def __call__(self, state: Any, context: Any) -> Any:
        """Return the next state; the last layer returns the loss, or logits without labels."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer that can be built anywhere.

    Attributes:
        name: canonical prefix of its parameters, the same in every layout (``layers.3``).
        build: makes the module, with uninitialised parameters.
        cost: relative work, for balancing stages.
        tied: key of a module shared with other specs of the same key; one instance a stage.
        call: how a tied module is used here: ``call(module, state, context)``; default
            ``module(state, context)``.
        recomputable: whether activation checkpointing may drop this layer's activations.
    """

    name: str
    build: Callable[[], nn.Module]
    cost: float = 0.0
    tied: str | None = None
    call: Callable[[nn.Module, Any, Any], Any] | None = None
    recomputable: bool = False


@dataclass(frozen=True)
class LayerPlan:
    """A whole model.

    Attributes:
        layers: in order; the last returns a scalar loss when the context has labels.
        prepare: ``prepare(state, labels, cache) -> context``, run once per stage and micro-batch.
        input_state: NamedTuple type of the first layer's input.
        state: NamedTuple type that crosses stages.
        seed: of initial values.
    """

    layers: tuple[LayerSpec, ...]
    prepare: Callable[[Any, tuple[Tensor, ...] | None, Any], Any]
    input_state: type
    state: type
    seed: int


def stage_bounds(plan: LayerPlan, stages: int, method: str) -> list[int]:
    """Cut the layers into contiguous stages; return ``stages + 1`` boundaries.

    ``balanced`` minimises the largest sum of costs over a stage (exact, by dynamic programming);
    ``uniform`` gives the same number of recomputable layers to each, ends riding along. Every stage
    gets a recomputable layer where there are enough, however heavy an output head is.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    body = [spec.recomputable for spec in plan.layers]
    costs = [
        spec.cost if method == "balanced" else float(spec.recomputable) for spec in plan.layers
    ]
    return _minimise_largest(costs, stages, body if sum(body) >= stages else [True] * len(body))


def _minimise_largest(costs: list[float], stages: int, needed: list[bool]) -> list[int]:
    """Best boundaries by dynamic programming; each stage gets a layer that is ``needed``."""
    count = len(costs)
    if stages > count:
        raise ValueError(f"{count} layers cannot be cut into {stages} stages")
    before, needed_before = [0.0], [0]
    for cost, need in zip(costs, needed, strict=True):
        before.append(before[-1] + cost)
        needed_before.append(needed_before[-1] + need)
    # best[s][i]: smallest possible largest stage when the first i layers form s stages
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for s in range(1, stages + 1):
        for i in range(s, count - (stages - s) + 1):
            for j in range(s - 1, i):
                if needed_before[i] == needed_before[j]:
                    continue
                value = max(best[s - 1][j], before[i] - before[j])
                if value < best[s][i]:
                    best[s][i], cut[s][i] = value, j
    bounds = [count]
    for s in range(stages, 0, -1):
        bounds.append(cut[s][bounds[-1]])
    return bounds[::-1]
