"""What a run shows and records."""

from megatrain.monitor.console import Console
from megatrain.monitor.run_log import RunLog, finite
from megatrain.monitor.throughput import Throughput
from megatrain.monitor.trace import write_trace
from megatrain.monitor.trackers import Trackers, check_installed
from megatrain.monitor.watchdog import Watchdog

__all__ = [
    "Console",
    "RunLog",
    "Throughput",
    "Trackers",
    "Watchdog",
    "check_installed",
    "finite",
    "write_trace",
]
