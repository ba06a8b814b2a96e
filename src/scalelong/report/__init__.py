"""Compare runs: tables, text, charts and an HTML report. No torch."""

from scalelong.report.compare import Comparison, compare_runs
from scalelong.report.html import write_report
from scalelong.runs.reader import Run, read_run, read_runs

__all__ = ["Comparison", "Run", "compare_runs", "read_run", "read_runs", "write_report"]
