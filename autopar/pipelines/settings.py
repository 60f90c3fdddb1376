"""The numbers that steer orders and cuts, each with its unit and what it was chosen by.

Orders were compared on pipelines of 4 and 8 ranks, one and two chunks a rank, one to six micro-batches a rank, even,
uneven and random stages, messages of 2 and 20 % of a forward, and memory for one and two times as many micro-batches as
ranks.
"""

from __future__ import annotations

from math import inf

DEPTHS = (2.0, inf, 1.5, 1.0)
"""How many micro-batches a stage starts before their gradients return, at most, in multiples of what keeps the slowest
rank busy where messages take no time. Beside the memory, for whoever runs ahead is in the way of backwards. 1 is the
depth of 1F1B, without which orders are longer than ZB-H1's where memory is short. The shortest of 42 settings are .3 %
shorter on average than the shortest of these."""

PATIENCES = (0.5, 1.0)
"""A backward of weights begins in a gap of this share of its seconds or more, though what comes next may then wait. .5
is better by .5 to 1 % on average, 1 where memory is short."""

TRIAL = 3
"""Micro-batches for each rank in a trial of all rules, where there are more; ``FINALISTS`` then run them all."""

FINALISTS = 3
"""With these two numbers, orders of 10 and 12 micro-batches for each rank were .03 % longer on average, and .4 % at
most, than the shortest of all rules."""

FEW_CUTS = 20_000
"""So many cuts are all compared, about .15 s of one core; of more, only neighbours of good ones."""
