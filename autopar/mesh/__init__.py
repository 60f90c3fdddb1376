"""Logical meshes, clusters and the hardware that they are made of."""

from autopar.mesh.mesh import Mesh

__all__ = ["Mesh"]
