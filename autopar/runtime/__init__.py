"""The module that users train, what it does around each call of its program, and the simulation of all ranks."""
