"""What a run shows and records."""

from megatrain.monitor.console import Console
from megatrain.monitor.run_log import RunLog, finite
from megatrain.monitor.trace import write_trace

__all__ = ["Console", "RunLog", "finite", "write_trace"]
