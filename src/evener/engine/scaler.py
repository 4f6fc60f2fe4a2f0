"""The loss scale of fp16: a small dynamic factor, owned by the engine, saved and restored with it.

The rule is GradScaler's: double after `growth_interval` good updates, halve after a bad one; the whole state lives on
the device and is updated there, so nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evener.errors import PrecisionError, nearest

_SETTINGS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class LossScale:
    """scale: float32, 0-dimensional, on the device. `scaler` is None, a dict of GradScaler's settings, or one."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        settings = dict(_SETTINGS)
        if isinstance(scaler, torch.amp.GradScaler):
            settings = {name: getattr(scaler, f"get_{name.removeprefix('init_')}")() for name in settings}
        elif isinstance(scaler, Mapping):
            for key in scaler:
                if key not in settings:
                    close = nearest(str(key), settings)
                    fix = [f"did you mean {close}?" if close else f"settings: {', '.join(settings)}"]
                    raise PrecisionError(f"scaler={dict(scaler)!r}: unknown setting {key!r}.", fix=fix)
            settings.update(scaler)
        if not (settings["init_scale"] > 0 and settings["growth_factor"] > 1 and 0 < settings["backoff_factor"] < 1):
            fix = ["init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1"]
            raise PrecisionError(f"scaler settings {settings} are out of range.", fix=fix)
        self.settings = settings
        self.growth_factor = float(settings["growth_factor"])
        self.backoff_factor = float(settings["backoff_factor"])
        self.growth_interval = int(settings["growth_interval"])
        self.scale = torch.full((), float(settings["init_scale"]), dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, found_inf: torch.Tensor) -> None:
        """Grow or back off by this update's flag (float32, 0-dimensional, 0 or 1). On the device, no host sync."""
        torch._amp_update_scale_(
            self.scale, self.growth_tracker, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval
        )

    def state_dict(self) -> dict[str, float | int]:
        """GradScaler's own keys. Reads the scale from the device (a host sync)."""
        return {
            "scale": float(self.scale),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growth_tracker),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self.growth_tracker.fill_(state["_growth_tracker"])
