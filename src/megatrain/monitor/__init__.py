"""What a run shows and records."""

from megatrain.monitor.console import Console
from megatrain.monitor.run_log import RunLog, finite
from megatrain.monitor.trace import write_trace
from megatrain.monitor.trackers import Trackers, check_installed

__all__ = ["Console", "RunLog", "Trackers", "check_installed", "finite", "write_trace"]
