"""Architectures of benchmarks/workloads.toml that no installed library builds, each at its published size by default."""
