"""A plan as a DeepSpeed ``PipelineModule``: each rank builds the layers of its stage."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import PipelineModule
from deepspeed.pipe import TiedLayerSpec as DeepSpeedTiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from ds_engine.parallel.dims import ParallelDims
from ds_engine.pipeline.plan import LayerPlan, LayerSpec, SharedSpec, stage_bounds
from ds_engine.pipeline.run_layers import (
    BoundLayer,
    build_layer,
    canonical_parameters,
    recomputed_layers,
    run_layers,
)
from ds_engine.pipeline.targets import Targets, TermSums


class _Planned(DeepSpeedLayerSpec):
    """Lets DeepSpeed build one of our layers."""

    def __init__(self, spec: LayerSpec, seed: int) -> None:
        super().__init__(nn.Module)
        self.spec, self.seed = spec, seed

    def build(self, log: bool = False) -> nn.Module:
        """Build and initialise."""
        return build_layer(self.spec, self.seed)


class _PlannedTied(DeepSpeedTiedLayerSpec):
    """Same for a layer whose module is shared with another stage.

    Every parameter of a tied module is tied: one without gradient on some stage would make the
    others wait for ever in the all-reduce.
    """

    def __init__(self, spec: LayerSpec, seed: int, attributes: list[str]) -> None:
        super().__init__(spec.tied, nn.Module, forward_fn=spec.call, tied_weight_attr=attributes)
        self.spec, self.seed = spec, seed

    def build(self, log: bool = False) -> nn.Module:
        """Build and initialise."""
        return build_layer(self.spec, self.seed)


class StageModule(PipelineModule):
    """This rank's stage of a plan.

    The last stage computes the loss inside ``forward``, from labels that the engine hands over with
    ``set_labels``: DeepSpeed then scales everything behind the loss alike, output weights included.

    Args:
        plan: the model.
        dims: degrees; the stage is this rank's place on the pipeline axis.
        partition: ``balanced`` or ``uniform``, see ``stage_bounds``.
        recompute_every: see ``recomputed_layers``.
    """

    def __init__(
        self, plan: LayerPlan, dims: ParallelDims, *, partition: str, recompute_every: int
    ) -> None:
        # nn.Module refuses attributes before its own __init__, which PipelineModule calls late.
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "bounds", stage_bounds(plan, dims.pipeline, partition))
        object.__setattr__(self, "labels", None)
        object.__setattr__(self, "terms", TermSums(len(plan.losses)))
        topology = PipeModelDataParallelTopology(
            num_pp=dims.pipeline, num_mp=dims.tensor, num_dp=dims.data
        )
        specs = [
            _Planned(spec, plan.seed)
            if spec.tied is None
            else _PlannedTied(spec, plan.seed, _parameter_names(spec))
            for spec in plan.layers
        ]
        # DeepSpeed prints its topology objects; what matters is in our own log.
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(specs, topology=topology, loss_fn=None)
        recomputed = recomputed_layers(plan, recompute_every)
        first, last = self._local_start, self._local_stop
        self._layers = tuple(
            BoundLayer(plan.layers[i], self._module_of(i), i in recomputed)
            for i in range(first, last)
        )

    @property
    def _shared(self) -> dict[str, nn.Module]:
        local = self.plan.shared_by(self._local_start, self._local_stop)
        return {spec.name: self.tied_modules[_key(spec)] for spec in local}

    def _build(self) -> None:
        for spec in self.plan.shared_by(self._local_start, self._local_stop):
            self.tied_modules[_key(spec)] = build_layer(spec, self.plan.seed)
            self.tied_weight_attrs[_key(spec)] = _parameter_names(spec)
        super()._build()

    def _index_tied_modules(self) -> dict[str, Any]:
        """Groups of the ranks that hold copies of a module, tied or shared; all ranks call.

        DeepSpeed's own knows tied layers only. A copy counts in the gradient norm on the first
        stage that has one.
        """
        holders: dict[str, set[int]] = {}
        for stage in range(self.num_stages):
            first, last = self.parts[stage], self.parts[stage + 1]
            keys = [spec.tied for spec in self.plan.layers[first:last] if spec.tied is not None]
            for key in [*keys, *map(_key, self.plan.shared_by(first, last))]:
                holders.setdefault(key, set()).add(stage)
        groups: dict[str, Any] = {}
        for key in sorted(holders):
            for ranks in self._copies(sorted(holders[key])):
                group = dist.new_group(ranks=ranks)
                if self.global_rank not in ranks:
                    continue
                module = self.tied_modules[key]
                groups[key] = {
                    "ranks": ranks,
                    "group": group,
                    "weight_attr": self.tied_weight_attrs[key],
                    "module": module,
                }
                for parameter in module.parameters():
                    parameter.ds_pipe_replicated = self.global_rank != ranks[0]
        return groups

    def _synchronize_tied_weights(self) -> None:
        # Else torch warns of the gradient of this broadcast, which nobody asks for.
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def _copies(self, stages: list[int]) -> Iterator[list[int]]:
        """For each place in the other axes, its ranks on the given stages."""
        topology = self._topo
        for data in range(topology.get_dim("data")):
            for model in range(topology.get_dim("model")):
                yield [topology.get_rank(pipe=s, data=data, model=model) for s in stages]

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self.bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _module_of(self, index: int) -> nn.Module:
        spec = self.plan.layers[index]
        if spec.tied is not None:
            return self.tied_modules[spec.tied]
        return getattr(self, str(index))

    @property
    def is_first(self) -> bool:
        """Whether this stage reads tokens."""
        return self._local_start == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self._local_stop == len(self.plan.layers)

    def set_labels(self, labels: Targets | None) -> None:
        """Labels of the next forward pass; only the last stage uses them."""
        self.labels = labels

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """This stage's parameters by their layout-independent names."""
        return canonical_parameters(self._layers, self._shared)

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        """Run the stage: the tensors to send on, or the loss (logits without labels)."""
        kind = self.plan.input_state if self.is_first else self.plan.state
        result = run_layers(self.plan, self._layers, self._shared, kind(*inputs), self.labels)
        if not self.is_last:
            return tuple(t.contiguous() for t in result)
        return result if self.labels is None else self.terms.add(result)


def _key(spec: SharedSpec) -> str:
    """Name of a shared module among DeepSpeed's tied modules; no dots in a module's name."""
    return "shared_" + spec.name.replace(".", "_")


def _parameter_names(spec: LayerSpec | SharedSpec) -> list[str]:
    with torch.device("meta"):  # the names without the memory
        return [name for name, _ in spec.build().named_parameters()]
