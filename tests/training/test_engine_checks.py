"""What the accelerator of a rank cannot train is refused before the first collective."""

from types import SimpleNamespace

import pytest

from ds_engine.errors import ConfigError
from ds_engine.training import engine


@pytest.mark.parametrize("name", ["Lion", "lamb"])
def test_an_optimizer_without_a_kernel_here_is_refused(name, monkeypatch) -> None:
    for device, refused in (("cpu", True), ("cuda", False)):
        found = SimpleNamespace(device_name=lambda device=device: device)
        monkeypatch.setattr(engine, "get_accelerator", lambda found=found: found)
        if refused:
            with pytest.raises(ConfigError, match=f"optimizer.type = {name}, .* use AdamW"):
                engine.check_optimizer(name)
        else:
            engine.check_optimizer(name)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad", "SGD"])
def test_the_others_run_everywhere(name) -> None:
    engine.check_optimizer(name)
