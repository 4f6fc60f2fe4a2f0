"""How busy a GPU is, as its driver counts it: the share of the time in which some kernel ran."""

from __future__ import annotations

import threading


class Busy(threading.Thread):
    """Asks NVML every few seconds, beside the training. A GPU that does not tell (MIG, no driver) stays unknown."""

    def __init__(self, uuid: str, seconds: float = 5.0) -> None:
        super().__init__(name="evener GPU utilisation", daemon=True)
        self.uuid, self.seconds = uuid, seconds
        self.percents: list[int] = []
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            import pynvml  # type: ignore[import-untyped]

            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
            while not self.ended.wait(self.seconds):
                self.percents.append(int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu))
        except Exception:  # whatever a driver or its absence raises: a run does without this number
            return

    def take(self) -> float | None:
        """The mean since this was last asked; None where nothing was counted."""
        found, self.percents = self.percents, []
        return sum(found) / len(found) if found else None
