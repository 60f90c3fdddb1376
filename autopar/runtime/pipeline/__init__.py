"""Runs a pipeline on the ranks of a job: its stages, the messages between them, and the order of what they do."""
