"""What a run shows and records."""

from megatrain.monitor.console import Console
from megatrain.monitor.plot import PICTURE, can_plot, plot_runs
from megatrain.monitor.run_log import RunLog, finite
from megatrain.monitor.stall import StallWatch
from megatrain.monitor.throughput import Throughput
from megatrain.monitor.trace import write_trace
from megatrain.monitor.trackers import Trackers, check_installed
from megatrain.monitor.watchdog import Watchdog

__all__ = [
    "PICTURE",
    "Console",
    "RunLog",
    "StallWatch",
    "Throughput",
    "Trackers",
    "Watchdog",
    "can_plot",
    "check_installed",
    "finite",
    "plot_runs",
    "write_trace",
]
