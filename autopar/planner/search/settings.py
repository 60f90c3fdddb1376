"""What steers the search, each setting with what chose it.

Work is counted in seconds of a quiet processor (see ``solver.clock``), so that settings mean the same on every machine.
"""

from __future__ import annotations

TRAINING_STEPS = 30_000
"""Optimizer steps of the run that a plan is for, unless the user says: a long fine-tuning, a short pretraining."""

LEAST_S = 1.0
"""Work that every search may take, however little a run can gain by it. Without it an LSTM of 81 KB within .9, .75 and
.6 of its peak took 3.6, 10 and 3.5 % longer than without a budget; with it 0, 9 and 0 %, after up to .2 s more."""

FIRST_LIMIT_S = 60.0
"""Limit for which the phases are run first, where there is time for another one of as much: the default. BERT large on
V100s with 400 s at once had a step of 339 ms, with 60 s one of 337."""

EMITTING_TIMES, EMITTING_SHARE = 4.0, 0.1
"""Work kept back for scheduling, measuring and emitting the plan: times the work of listing and pricing the decisions,
and at most this share of the limit."""

SMALLEST_PEAK_SHARE, SMALLEST_PEAK_LEAST_S = 0.25, 0.5
"""Work kept back for the smallest peak, which is searched where no plan is found: a share of the limit, and at least
these seconds. Only the list of what can be run again, which it needs too, and layers recomputed whole, which hold
little themselves, may use it. An error names the budget that it finds, and a search with that budget has as much work
for it."""

FREE_SHARE = 0.4
"""Share of the work for the optimum without a budget, which gets the rest once it fits: of 12 layers of Gemma 2, whose
attention is written out, it took all work to lower a gap of 1.8 %, and no plan was found."""

FREE_GAP, FREE_FINE_SHARE = 0.01, 0.1
"""Relative gap at which the optimum without a budget is good enough where no known way to train fits, once so much of
the work has gone to it. Llama 3 405B on 64 GPUs had a gap of .5 % after half of the work that took it to .3 %, and the
search within the budget had none left."""

KNOWN_WAYS_TIMES = 4.0
"""Times the cheapest known way to train that another one may cost and still be measured before there is a plan. One of
Llama 3 405B that costs 9 times the cheapest has no equal layers, and took a tenth of the work. Its choice is of no use
either: to solve those of Whisper large exactly took 5 s of the 40 that its search has."""

HOPELESS = (1.02, 1.1)
"""A step takes hardly less than its cost, unless what the program waits for on several axes runs beside each other: of
baselines that cost so many times our step, on one axis and on several, none is looked at."""

JOINT_ROUNDS, PER_OPTION_ROUNDS = 12, 40
"""Rounds of the joint problem at most: with margins for all options, and with margins for one option each."""

ROUND_SHARE, LEAST_ROUND = 0.6, 0.5
"""Share of the work left for one round, which is not begun with less than so much of the work of the last one. The
linear program of blocks cannot be cut short: that of a 70B model on 64 devices took 6 s, and with 1 s tells nothing."""

MOST_UNREPEATED = 3_000
"""Undecided nodes up to which a choice is repaired where no blocks repeat: 5,414 took longer than a round."""

KNOWN_ROUNDS = 4
"""Rounds with fixed shardings. With two to repair a choice, that of Llama 3 8B on 8 H100s within 10.2 GB was still 3 %
over the budget, and the step that was found took 1,160 instead of 992 ms."""

LAYERS_MOST = 2
"""Known shardings with which layers are recomputed whole for a first plan. Of DeBERTa V2 XL none of ten fitted within
half of the free peak, and they took the work for known shardings under constraints, which did."""

LAYERS_TIMES = 1.5
"""Times the work of listing the decisions that is left at least when that is begun: each takes .7 to 3 times that.
While work was kept back from it, Llama 3 405B on 64 GPUs of a rack had .6 times that left, and known shardings nothing
after it; FLAN-T5 XL within .8 of its peak had 1.9 times, of 30 s, and without these layers no plan."""

KNOWN_GAP, REPAIR_GAP = 0.01, 1e-3
"""Relative gap at which a problem with fixed shardings is solved: another phase follows the first, none the second. The
first is also that of known ways to train that are not among the cheapest: those of DDPM 256 took 13 s exactly, 7 so."""

KNOWN_TIMES, KNOWN_LEAST_S = 2.0, 0.5
"""Work for known shardings once a plan is found, times that of the free search, and seconds at least: so a first plan
is there, and decent, within about three times the free search."""

KNOWN_AGAIN = 0.1
"""Share of the work that is left up to which known shardings are solved again, with less set aside: so long the first
solve took. OPT 1.3B on 8 A100s costs 1.4 % less then; large models need that work for the joint problem."""

LEAN = 1.25
"""Times the least that a baseline holds: the cheapest of those up to there is tried first."""

MARGIN = 0.1
"""Share of the budget that is set aside at every point where the first plan that fits will do. Programs of 70B, 175B
and 405B hold up to 7 % more than their constraints say; a plan that fits in a tenth less costs up to 1.1 % more."""

WEIGH_GAP = 0.01
"""Relative gap of a plan that fits from which the paths of its phases get other weights: under a tight budget other
paths are the longest than without one. GPT-2 XL on 64 V100s cost 1.4 times its bound with the weights of the latter."""

EXPOSED_SHARE, EXPOSED_ROUNDS = 5e-3, 2
"""Where the program of a plan that fits waits for transfers for more than this share of its cost, constraints are added
that let them hide, at most so many times."""

NEARLY_FITS = 1.1
"""Times the budget up to which a program is measured with its collectives arranged, which may hold a little less."""

FREE_FIRST = 1.3
"""Times the budget that the optimum without one may hold and its shardings still be the first that are tried. Whisper
large within .8 of its peak cost 264 ms with the leanest first, and 246 ms so."""

TIES_LEAST = 600
"""Variables from which the paths that are nearly the longest get a little weight, which tells ties apart. It takes that
much from the bound, and smaller problems are solved to the end."""

EXACT_MOST = 2_000
"""Variables up to which keep, recompute and offload are also searched with exact memory on one device."""

CONSTRAINTS_SHARE = 0.8
"""Share of the work for the smallest peak on one device that goes to constraints; exact memory goes on from there."""
