"""The whole plan in one module: for one process, tensor parallelism and all ZeRO stages."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ds_engine.pipeline.plan import LayerPlan
from ds_engine.pipeline.run_layers import (
    BoundLayer,
    build_layer,
    canonical_parameters,
    recomputed_layers,
    run_layers,
)
from ds_engine.pipeline.targets import Targets, TermSums


class SequentialModel(nn.Module):
    """All layers of a plan, one after the other.

    Args:
        plan: the model.
        recompute_every: see ``recomputed_layers``; 0 keeps all activations.
    """

    def __init__(self, plan: LayerPlan, recompute_every: int = 0) -> None:
        super().__init__()
        self.plan = plan
        recomputed = recomputed_layers(plan, recompute_every)
        modules: dict[str, nn.Module] = {}
        layers = []
        for index, spec in enumerate(plan.layers):
            key = spec.tied or str(index)
            if key not in modules:
                modules[key] = build_layer(spec, plan.seed)
            layers.append(BoundLayer(spec, modules[key], index in recomputed))
        self._shared = {
            spec.name: build_layer(spec, plan.seed) for spec in plan.shared_by(0, len(plan.layers))
        }
        self.stack = nn.ModuleList([*modules.values(), *self._shared.values()])
        self._layers = tuple(layers)
        self.terms = TermSums(len(plan.losses))

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their layout-independent names."""
        return canonical_parameters(self._layers, self._shared)

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        labels: Targets | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Run the model.

        Args:
            inputs: the fields of ``plan.input_state``.
            labels: labels and weights of each loss term; None: return logits.
            cache: keys and values of earlier positions, for generation.

        Returns:
            A scalar loss, whose terms are also noted in ``terms``; or logits (B, S, V).
        """
        state = self.plan.input_state(*inputs)
        result = run_layers(self.plan, self._layers, self._shared, state, labels, cache)
        return result if labels is None else self.terms.add(result)
