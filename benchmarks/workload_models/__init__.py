"""The set-ups of benchmarks/workloads.toml, and the architectures that no installed library builds."""
