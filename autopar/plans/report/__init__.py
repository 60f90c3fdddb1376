"""The report of a plan: one HTML file that opens anywhere, without a network."""

from autopar.plans.report.page import page

__all__ = ["page"]
