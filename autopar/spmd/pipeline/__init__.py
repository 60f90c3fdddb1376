"""Runs a rank's part of a pipeline: the loop over its actions, the stages' programs, and the messages between ranks."""
