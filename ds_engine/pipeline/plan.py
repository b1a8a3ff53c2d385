"""A model as a flat list of layers: the one description that every engine builds from.

The same ``LayerPlan`` becomes a DeepSpeed pipeline stage or a plain sequential module. A layer is
called as ``layer(state, context)``: ``state`` is a NamedTuple of tensors that may cross a stage
boundary, ``context`` holds what each stage derives once per micro-batch for all its layers
(attention masks, rotary tables) and what only one end of the model needs (labels, caches).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ds_engine.pipeline.targets import Targets

State = tuple[Tensor, ...]
# (the first layer's inputs, labels and weights of each loss term in turn) of one micro-batch
Batch = tuple[tuple[Tensor, ...], Targets]
Shared = Mapping[str, nn.Module]


class Layer(Protocol):
    """What a plan is made of."""

    def __call__(self, state: Any, context: Any) -> Any:
        """Return the next state; the last layer returns the loss, or logits without labels.

        A loss of several terms is returned as (terms,), in the order of ``LayerPlan.losses``; in
        evaluation mode, the sums of ``LayerPlan.measures``.
        """


@dataclass(frozen=True)
class LayerSpec:
    """One layer that can be built anywhere.

    Attributes:
        name: canonical prefix of its parameters, the same in every layout (``layers.3``).
        build: makes the module, with uninitialised parameters.
        cost: relative work, for balancing stages.
        tied: key of a module shared with other specs of the same key; one instance a stage.
        call: how the module is used here: ``call(module, state, context)``; default
            ``module(state, context)``.
        recomputable: whether activation checkpointing may drop this layer's activations.
        uses: names of the plan's shared modules that the layer needs in its context.
    """

    name: str
    build: Callable[[], nn.Module]
    cost: float = 0.0
    tied: str | None = None
    call: Callable[[nn.Module, Any, Any], Any] | None = None
    recomputable: bool = False
    uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class SharedSpec:
    """A module whose result many layers use, such as T5's table of relative positions.

    Each stage with a layer that ``uses`` it holds a copy, and ``LayerPlan.prepare`` calls it once a
    micro-batch; the copies' gradients are summed over the stages, as for tied layers.

    Attributes:
        name: canonical prefix of its parameters.
        build: makes the module, with uninitialised parameters.
    """

    name: str
    build: Callable[[], nn.Module]


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss, with targets of its own.

    Attributes:
        name: for people and logs.
        num_classes: of a term that gives each row a class; None: a word for each position.
    """

    name: str = "loss"
    num_classes: int | None = None


@dataclass(frozen=True)
class Measure:
    """A number that is summed over targets: a loss term, or the correct answers to one.

    Attributes:
        name: for people and logs.
        term: index of the loss term whose targets it is about.
    """

    name: str
    term: int


@dataclass(frozen=True)
class LayerPlan:
    """A whole model.

    Attributes:
        layers: in order; the last returns the loss when the context has labels.
        prepare: ``prepare(state, labels, cache, shared) -> context``, run once per stage and
            micro-batch; ``shared`` holds the stage's shared modules by name.
        input_state: NamedTuple type of the first layer's input; its last field is the (B,) sample
            numbers.
        state: NamedTuple type that crosses stages.
        seed: of initial values.
        shared: modules that layers use through the context.
        losses: the loss terms, in the order of a batch's targets.
    """

    layers: tuple[LayerSpec, ...]
    prepare: Callable[[Any, Targets | None, Any, Shared], Any]
    input_state: type
    state: type
    seed: int
    shared: tuple[SharedSpec, ...] = ()
    losses: tuple[LossTerm, ...] = (LossTerm(),)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What the last layer returns in evaluation mode: the loss terms, then accuracies."""
        terms = [Measure(term.name, index) for index, term in enumerate(self.losses)]
        accuracies = [
            Measure(term.name.removesuffix("loss") + "accuracy", index)
            for index, term in enumerate(self.losses)
            if term.num_classes is not None
        ]
        return (*terms, *accuracies)

    def shared_by(self, first: int, last: int) -> tuple[SharedSpec, ...]:
        """The shared modules that the layers ``first`` to ``last - 1`` use."""
        used = {name for spec in self.layers[first:last] for name in spec.uses}
        return tuple(spec for spec in self.shared if spec.name in used)


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
