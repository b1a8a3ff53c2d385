"""Running a list of layers, recomputing activations where asked: for both kinds of module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_engine.parallel.init import initialize
from ds_engine.pipeline.plan import LayerPlan, LayerSpec, Shared, SharedSpec
from ds_engine.pipeline.targets import Targets


@dataclass(frozen=True)
class BoundLayer:
    """A spec with the module that was built for it on this rank."""

    spec: LayerSpec
    module: nn.Module
    recompute: bool

    def __call__(self, state: Any, context: Any) -> Any:
        """Run the layer in its own way."""
        call: Callable[..., Any] = self.module if self.spec.call is None else self._called
        if self.recompute and self.module.training:
            # Dropout needs no random state (ds_engine.parallel.random), so none is saved.
            return checkpoint(call, state, context, use_reentrant=False, preserve_rng_state=False)
        return call(state, context)

    def _called(self, state: Any, context: Any) -> Any:
        assert self.spec.call is not None
        return self.spec.call(self.module, state, context)


def recomputed_layers(plan: LayerPlan, every: int) -> frozenset[int]:
    """Indices of the layers whose activations are dropped: each ``every``-th recomputable one.

    Counted over the whole model, so that the choice does not depend on the stages.
    """
    candidates = [i for i, spec in enumerate(plan.layers) if spec.recomputable]
    return frozenset(candidates[::every]) if every else frozenset()


def build_layer(spec: LayerSpec | SharedSpec, seed: int) -> nn.Module:
    """Build and initialise a layer; parameters remember their canonical name."""
    module = spec.build()
    for name, parameter in module.named_parameters():
        initialize(parameter, f"{spec.name}.{name}", seed)
    return module


def canonical_parameters(layers: Sequence[BoundLayer], shared: Shared) -> dict[str, nn.Parameter]:
    """This rank's parameters by their layout-independent names; tied ones once."""
    modules = [(layer.spec.name, layer.module) for layer in layers]
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in [*modules, *shared.items()]
        for name, parameter in module.named_parameters()
    }


def run_layers(
    plan: LayerPlan,
    layers: Sequence[BoundLayer],
    shared: Shared,
    state: Any,
    labels: Targets | None,
    cache: Any = None,
) -> Any:
    """Run consecutive layers of a plan on one micro-batch."""
    context = plan.prepare(state, labels, cache, shared)
    for layer in layers:
        state = layer(state, context)
    return state
