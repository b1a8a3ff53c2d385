"""DeepSpeed engines with the hooks that the trainer and the equality proof need.

Three things are ours: labels reach the last stage's ``forward``; a callback sees the reduced
gradients just before the update; and clipping in fp32 without ZeRO counts each parameter once
(DeepSpeed 0.19.8 skips replicated parameters of all pipeline stages but the first there).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

BeforeUpdate = Callable[[], None]
# A mixin only has DeepSpeed's methods for a type checker, and must not inherit them twice.
_Engine: Any = DeepSpeedEngine if TYPE_CHECKING else object


def global_gradient_norm(parameters: list[nn.Parameter], mpu: Any) -> Tensor:
    """L2 norm of all gradients, each logical parameter counted once.

    A tensor-parallel shard counts on its rank, a replicated parameter on tensor rank 0 of its
    stage, a tied one on the stage that owns it.
    """
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    squares = [
        p.grad.detach().float().square().sum()
        for p in parameters
        if p.grad is not None
        and not getattr(p, "ds_pipe_replicated", False)
        and (p.tensor_model_parallel or tensor_rank == 0)  # type: ignore[attr-defined]
    ]
    device = parameters[0].device
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    if mpu.get_model_parallel_world_size() > 1:
        dist.all_reduce(total, group=mpu.get_model_parallel_group())
    return total.sqrt()


class _OwnUpdate(_Engine):
    """Mixin: the callback before the update, and fp32 norm, clipping and skipping."""

    before_update: BeforeUpdate | None = None

    def _plain_fp32(self) -> bool:
        low = self.fp16_enabled() or self.bfloat16_enabled()
        return not low and not self.zero_optimization()

    def _take_model_step(self, lr_kwargs: Any) -> None:
        if self.before_update is not None:
            self.before_update()
        if not self._plain_fp32():
            super()._take_model_step(lr_kwargs)
            return
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        norm = global_gradient_norm(parameters, self.mpu)
        self._global_grad_norm = float(norm)
        self.optimizer.overflow = not torch.isfinite(norm).item()
        if self.optimizer.overflow:
            # A non-finite gradient must not reach the weights: leave nothing to update with.
            for p in parameters:
                p.grad = None
        elif self.gradient_clipping() > 0:
            scale = self.gradient_clipping() / (self._global_grad_norm + 1e-6)
            if scale < 1:
                torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
        super()._take_model_step(lr_kwargs)

    def clip_fp32_gradients(self) -> None:
        """Nothing: ``_take_model_step`` has clipped already."""


class PlainEngine(_OwnUpdate, DeepSpeedEngine):
    """Engine of a ``SequentialModel``."""


class StageEngine(_OwnUpdate, PipelineEngine):
    """Engine of a ``StageModule``."""

    def _exec_forward_pass(self, buffer_id: int) -> None:
        self.module.set_labels(self.pipe_buffers["labels"][buffer_id])
        super()._exec_forward_pass(buffer_id)
        self.module.set_labels(None)

    # DeepSpeed dispatches through this table and not by name, so overriding is not enough.
    _INSTRUCTION_MAP = {  # noqa: RUF012 - DeepSpeed's own class attribute
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _exec_forward_pass,
    }


def make_engine(
    module: nn.Module, groups: list[dict[str, Any]], config: dict[str, Any], mpu: Any
) -> Any:
    """Wrap a model in its engine.

    Args:
        module: a ``StageModule`` or a ``SequentialModel``.
        groups: optimizer parameter groups.
        config: DeepSpeed's JSON.
        mpu: a ``ParallelContext``; ignored for a ``StageModule``, whose grid DeepSpeed needs.
    """
    from ds_engine.pipeline.stage import StageModule

    kind: type[Any] = PlainEngine
    if isinstance(module, StageModule):
        kind = StageEngine
        mpu = PipelineModule.mpu(module)
    # DeepSpeed prints memory tables while it wraps an optimizer; errors still come as exceptions.
    with contextlib.redirect_stdout(io.StringIO()):
        return kind(
            args=None,
            model=module,
            model_parameters=groups,
            mpu=mpu,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )
