"""Logical meshes, and clusters with their hardware."""

from autopar.mesh.cluster import Cluster, Device, Library, Link, builtin_clusters, cluster_of_device
from autopar.mesh.measured import CollectiveTimes, Curve, KernelTimes, Measured, rising
from autopar.mesh.mesh import Mesh
from autopar.mesh.topology import AxisLink, axis_links, candidate_meshes, without_axis

__all__ = [
    "AxisLink",
    "Cluster",
    "CollectiveTimes",
    "Curve",
    "Device",
    "KernelTimes",
    "Library",
    "Link",
    "Measured",
    "Mesh",
    "axis_links",
    "builtin_clusters",
    "candidate_meshes",
    "cluster_of_device",
    "rising",
    "without_axis",
]
