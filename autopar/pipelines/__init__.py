"""Pipelines as data: actions, schedules, their exact makespan, and balanced cuts; no graph, no device, no torch."""
