"""What a run shows and records."""

from megatrain.monitor.console import Console
from megatrain.monitor.run_log import RunLog

__all__ = ["Console", "RunLog"]
