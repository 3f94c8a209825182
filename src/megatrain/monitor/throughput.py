"""How fast a run is: tokens, FLOPs and seconds, since the last row of the log and to the end."""

import time
from collections.abc import Callable


class Throughput:
    """Of one process's part of a run.

    Args:
        first: steps that were done before.
        flops_per_token: 6N, of the parameters that a token uses; None if that is not known.
        matmul_flops_per_s: of a large product on this device; None if that is not known.
        clock: seconds since some moment.
    """

    def __init__(
        self,
        first: int,
        *,
        flops_per_token: float | None = None,
        matmul_flops_per_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._first, self._clock = first, clock
        self._flops_per_token, self._matmul = flops_per_token, matmul_flops_per_s
        self._began = self._since = clock()
        self._tokens = self._rows = self._steps = 0

    def add(self, tokens: int, *, rows: int) -> None:
        """A step: its tokens, padding left out, and its rows."""
        self._tokens += tokens
        self._rows += rows
        self._steps += 1

    def leave_out(self, seconds: float) -> None:
        """What was no training, such as an evaluation."""
        self._since += seconds

    def figures(self) -> dict[str, float]:
        """Rates since they were asked for last, by name; what is not known is left out."""
        now = self._clock()
        rate = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since = 0, now
        found = {"tokens_per_second": rate}
        if self._flops_per_token is not None:
            flops_per_s = rate * self._flops_per_token
            found["tflops_6n"] = flops_per_s / 1e12
            if self._matmul is not None:
                found["mfu_6n"] = flops_per_s / self._matmul
        return {name: float(f"{value:.5g}") for name, value in found.items()}

    def totals(self) -> dict[str, float]:
        """Of this process's part, evaluations and checkpoints included, as transformers has it."""
        seconds = max(self._clock() - self._began, 1e-9)
        return {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(self._rows / seconds, 3),
            "train_steps_per_second": round(self._steps / seconds, 3),
        }

    def seconds_left(self, step: int, total_steps: int) -> float:
        """At the pace of this process so far, all that is no training included."""
        seconds = self._clock() - self._began
        return seconds / (step - self._first) * (total_steps - step)
