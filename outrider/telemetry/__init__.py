"""What a process tells those who run it: logs, traces and metrics."""
