"""Measure a process group and its devices into a cluster file, for `autopar profile`."""

from autopar.profiling.cluster import Effort, profile_cluster
from autopar.profiling.fit import fit_line
from autopar.profiling.group import join, launched

__all__ = ["Effort", "fit_line", "join", "launched", "profile_cluster"]
