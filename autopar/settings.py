"""What steers the search and its solver, each setting with what chose it.

Work is counted in seconds of a quiet processor (see ``solver.clock``), so that settings mean the same on every machine.
Prices of that work, and roundings, are where they are used: they steer nothing.

S, K (29 and 35 thousand nodes) and V (816 nodes, a duality gap of 20 %) are instances of the contest that
``benchmarks/iopddl.py`` reads.
"""

from __future__ import annotations

# -- the clock ---------------------------------------------------------------------------------------------------------

WORK_SHARE = 0.75
"""Counted seconds of work that a search may take for a second of its time limit."""

STEADY_S = 0.2
"""Before so much has gone nothing is said of the pace."""

SLOWEST = 2.0
"""Seconds on the wall for one of others' work: what takes longer than that may as well be left for what comes next."""

# -- shares of the work that is left -----------------------------------------------------------------------------------

MAIN_SHARE = 0.6
"""For what mostly leads to the result: so four tenths are left for one more try, or for what comes next."""

PART_SHARE = 0.4
"""For one of two parts, of which the other mostly matters more: bounds, reductions, and the optimum without a budget
where there is one. Of 12 layers of Gemma 2, whose attention is written out, it took all work to lower a gap of 1.8 %,
and no plan was found. With .18 of a solve for a bound under known prices, and not .3, Gemma 2 27B has a gap of 4.5 %,
and not 2.4 %."""

SIDE_SHARE = 0.25
"""For what may help: linear programs, sweeps, comparisons with known ways to train, and what is kept for the smallest
peak. The linear program of blocks of GPT-2 XL on two axes left 3 %, in 4 s, and message passing 33 %, after 2 s or
after 20. With .7 for it one weighting of the paths of HuBERT XL took all the time, and what several tell is worth
more."""

SMALL_SHARE = 0.1
"""For what is done besides. Llama 3 405B on 64 GPUs had a gap of .5 % after half of the work that took it to .3 %, and
the search within the budget had none left; OPT 1.3B on 8 A100s costs 1.4 % less with known shardings solved again,
where that takes no more."""

LEAST_S = 1.0
"""Work that every search may take, however little a run can gain by it, and every part of it, however little is left.
Without it an LSTM of 81 KB within .9, .75 and .6 of its peak took 3.6, 10 and 3.5 % longer than without a budget; with
it 0, 9 and 0 %, after up to .2 s more."""

LATEST_S = 5.0
"""So long after the search's end a known way to train that may be quicker is still looked at, and plans that may be
much quicker: the cheapest two of a diffusion model (DDPM 256) within .8 of its peak waited for transfers a third of
their steps."""

IDLE_SHARE = 0.5
"""Share of its time without progress after which a part of the search ends."""

PATIENCE = 20
"""Rounds without progress after which it may end."""

# -- gaps --------------------------------------------------------------------------------------------------------------

NEAR = 0.01
"""Relative gap that counts as near the optimum, where another step follows, and of memory, near the smallest peak: of
known shardings that are repaired later, of known ways to train that are not among the cheapest (those of DDPM 256 took
13 s exactly, 7 so), and from which the paths of a plan's phases get other weights: under a tight budget other paths are
the longest than without one. GPT-2 XL on 64 V100s cost 1.4 times its bound with the weights of the latter."""

REPAIR_GAP = 1e-3
"""Relative gap at which a problem with fixed shardings is solved where no other step follows."""

PART_OF_GAP = 0.25
"""Of the gap that was asked, what one part of a problem may leave, or a bound."""

ROUGH, FINE = 0.03, 0.003
"""Rise of the bound between two looks at it, as a share of the gap, below which message passing ends: at first, and in
the end."""

STALL = 1e-4
"""The same for each of ``PATIENCE`` sweeps where nothing else raises the bound."""

LEAST_SWEEPS = 6
"""Messages take some sweeps to come around."""

NEARLY = 1.1
"""Times the budget up to which a program is measured with its collectives arranged, which may hold a little less; and
times a step up to which others are looked at: a step takes hardly less than its cost, unless what the program waits for
on several axes runs beside each other."""

EXPOSED_SHARE = 5e-3
"""Where the program of a plan that fits waits for transfers for more than this share of its cost, constraints are added
that let them hide. With 1 % BART large and Whisper large within .8 of their peaks have the same steps."""

# -- rounds ------------------------------------------------------------------------------------------------------------

ROUNDS = 40
"""Of anything, at most: time or a result ends most things sooner."""

REPAIR_ROUNDS = 4
"""Of repairs. With two to repair a choice with fixed shardings, that of Llama 3 8B on 8 H100s within 10.2 GB was still
3 % over the budget, and the step that was found took 1,160 instead of 992 ms."""

FEW = 2
"""Of what is tried where more hardly help: known choices to begin with, known shardings whose layers are recomputed
(of DeBERTa V2 XL none of ten fitted within half of the free peak, and they took the work for what did), linear programs
of the nearest columns, constraints that let transfers hide."""

LEAST_ROUND = 0.5
"""Of the work of the last round: with less no other one is begun. The linear program of blocks cannot be cut short:
that of a 70B model on 64 devices took 6 s, and with 1 s tells nothing."""

# -- sizes -------------------------------------------------------------------------------------------------------------

SMALL = 1_000
"""Variables up to which a problem is small: it is solved to the end, to the byte, and node by node. Of Demucs with
19,448 nodes prices left .3 % after 14 s and message passing 18 %; of 370 nodes of GPT-2 XL both left about as much."""

EXACT_MOST = 2_000
"""Variables up to which keep, recompute and offload are also searched with exact memory on one device, and undecided
ones up to which a choice is repaired where no blocks repeat: 5,414 took longer than a round."""

FLOWS = 15_000
"""Of an integer program: with a limit the cuts at the root take longer. Programs of 74, 77 and 102 thousand had none
done that told anything after 24, 7 and 33 s; those of 6 to 10 thousand took 1 to 11 s."""

FLOWS_A_SECOND = 3_000
"""Flows for each second that is left: HiGHS tells little of how long the cuts at the root take. Those of 24 and 36
thousand flows took 7 and 14 s (a way to shard BLOOM 7B, whose attention is written out)."""

MANY_FLOWS, MAX_FLOWS = 500_000, 2_000_000
"""Of a linear program: those from which on one with a limit is solved from the nearest of its columns, and those from
which on none is. Without a limit there is nothing that tells which are near: of Marian the best choice among those was
the one that was known."""

NEAREST = 0.25
"""Of the options, those that are in a linear program of the nearest columns; twice as many where they allow nothing."""

PART_PAIRS = 40_000
"""Pairs of options of a part that is solved with the rest held fixed. With 150,000 each took 8 s on V and none found
anything for 20 s; with these V's optimum was found within 8 s."""

TABLE = 1e8
"""Elements of the largest tables that are made: with 372 million edges, of an 8B model over three mesh axes, a search
by prices took 24 GB; S has 5 million."""

ELIMINATED = 2e6
"""Elements of all tables of an elimination, .05 s. An integer program takes 25 s for chains of 80 nodes with 5 options
and 4 neighbours or so, whose tables have 3e4; with 2e7, toys took .4 s more, which equal blocks save."""

MERGED = 2e7
"""Element operations that looking for options of two nodes which may be one in a network of flows may take."""

LEAVES, MOVES = 3e4, 3e5
"""Elements of a table over a node that leaves under every price and its neighbours, at most, and of one that is made
anew in each move: 72 % of the nodes of S and 78 % of those of K are leaves, and the others' tables stay small; .04 s a
move on S."""

WORK, EACH = 1.5e8, 3e5
"""Element operations that looking for dominated options may take, some tenths of a second; and one product of two
matrices, as long as message passing has not told which options are superfluous."""

AT_ONCE = 50_000
"""Element operations that are done at once, where merging identical rows and columns first would take longer."""

FILL = 1.5
"""Eliminating a node may replace its pairs of options by this many times as many."""

SAVED = 0.2
"""Of a graph, what leaving something out must save to be worth a copy of it."""

FOLDED_LEAST, FOLDED_MARGIN = 5, 1
"""Equal blocks that are worth folding, and so many of them at both ends that choose for themselves: what precedes and
follows them may suit others."""

# -- prices of the limit -----------------------------------------------------------------------------------------------

FIRST_PRICE = 0.1
"""Of what all costs, for all of the limit, where no prices are known: those of real problems are a tenth of the one to
a few times it. By these and none the nearest columns are told."""

FIRST_FACTOR = 30.0
"""Times which they are first, and again, until something fits (S, K)."""

SHARPNESS = 40.0
"""First prices at times go with the exponential of so many times the share of the limit that is used at least: 60
overshoots later on, 20 is slow at first (S, K)."""

DEARER = 0.04
"""In the first round of a repair what is over the limit gets so much dearer, as a share of the prices' sum; in each
that follows four times as much."""

STEP, SHORTER, LEAST_STEP = 0.7, 0.8, 0.05
"""Exponent of prices for a use beyond the limit by all of it; times which it is where the bound has not risen for some
rounds; and its least. A price moves by e at most and halves at least."""

FASTER, FASTEST = 1.15, 5.0
"""Times the step of a time that is over, or under, the limit another time in a row, and up to that: one row of S that
is 11 % over needs it."""

POLISHING = (0.5, 1.5)
"""Seconds for better choices near the best, for each of messages: while the bound rises, and when it rises by less than
a hundredth in ten rounds. With 1 for both, the first known shardings of Qwen3 30B cost 1.4 % more."""

MOST_MOVES = 8
"""Ways to move, each with hubs of its own; another one every fourth round."""

# -- the search --------------------------------------------------------------------------------------------------------

TRAINING_STEPS = 30_000
"""Optimizer steps of the run that a plan is for, unless the user says: a long fine-tuning, a short pretraining."""

FIRST_LIMIT_S = 60.0
"""Limit for which the phases are run first, where there is time for another one of as much: the default. BERT large on
V100s with 400 s at once had a step of 339 ms, with 60 s one of 337."""

EMITTING_TIMES = 4.0
"""Work kept back for scheduling, measuring and emitting the plan: times the work of listing and pricing the decisions,
and at most ``SMALL_SHARE`` of the limit."""

KNOWN_WAYS_TIMES = 4.0
"""Times the cheapest known way to train that another one may cost and still be measured before there is a plan. One of
Llama 3 405B that costs 9 times the cheapest has no equal layers, and took a tenth of the work. Its choice is of no use
either: to solve those of Whisper large exactly took 5 s of the 40 that its search has."""

LAYERS_TIMES = 1.5
"""Times the work of listing the decisions that is left at least when layers are recomputed: each way takes .7 to 3
times that. While work was kept back from it, Llama 3 405B on 64 GPUs of a rack had .6 times that left, and known
shardings nothing after it; FLAN-T5 XL within .8 of its peak had 1.9 times, of 30 s, and without these layers no
plan."""

KNOWN_TIMES = 2.0
"""Work for known shardings once a plan is found, times that of the free search: so a first plan is there, and decent,
within about three times the free search."""

LEAN = 1.3
"""Times the least that a baseline holds: the cheapest of those up to there is tried first. Times the budget that the
optimum without one may hold, and its shardings come before: Whisper large within .8 of its peak cost 264 ms with the
leanest first, and 246 ms so."""

MARGIN = 0.1
"""Share of the budget that is set aside at every point where the first plan that fits will do. Programs of 70B, 175B
and 405B hold up to 7 % more than their constraints say; a plan that fits in a tenth less costs up to 1.1 % more."""

COST_GAP = 0.3
"""Relative gap of the cheapest choice near the smallest peak, which has only to be found."""

LESS = 0.16
"""Share of a peak by which the next one is smaller on one device, and then a fourth of that, down to ``NEAR``."""
