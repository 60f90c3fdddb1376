"""Choices within a limit, and a bound: prices on what is used, exact moves under them, and the parts of these that fit.

Every round prices what is used at each time (Lagrange 1797; Everett 1963), passes messages once to and fro, which gives
a bound at any prices, and moves exactly (``core``). A choice that is over the limit gives its best parts to the best
choice known, which never leaves the limit (``crossover``); times that it overuses become dearer, by factors and not by
sums (Plotkin, Shmoys and Tardos 1995), so that prices need no scale and end on the few times that matter. Without a
limit nothing is priced: moves start from the best choice, and messages raise the bound.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar import settings
from autopar.solver.priced.core import Core
from autopar.solver.priced.crossover import crossover
from autopar.solver.priced.network import Network
from autopar.solver.problem import Array, IndexArray, UsagePrices
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent

LEAST_PRICE = 1e-5
"""Of the mean price: from zero no factor leads anywhere."""


class PricedSearch:
    """Prices, messages and choices of a graph that doesn't change meanwhile."""

    def __init__(self, graph: Graph, incumbent: Incumbent) -> None:
        self.incumbent = incumbent
        self.network = Network(graph)
        self._random = np.random.default_rng(0)
        self.core = Core(self.network, self._random)
        self.core.add_program(0.5)
        self.best: IndexArray | None = None
        self.value = np.inf
        self.used = np.zeros(len(self.network.limits))
        self.prices = np.zeros(len(self.network.limits))
        self._fit: Array | None = None
        self.rounds = 0
        self._scale: float | None = None
        self._spent: dict[str, float] = {}
        if incumbent.choice is not None:
            self._adopt(self.network.project(incumbent.choice))

    # -- choices -----------------------------------------------------------------------------------------------------

    def _adopt(self, choice: IndexArray) -> bool:
        """Whether the choice is allowed and cheaper than the best here, which it then is."""
        value = self.network.value(choice, self.network.cost)
        if value >= min(self.value, self.network.barred / 2):
            return False
        used = self.network.used(choice)
        if (used > self.network.limits).any():
            return False
        self.best, self.value, self.used = choice.copy(), value, used
        return True

    def offer(self, choice: IndexArray) -> bool:
        """Whether the choice is the best so far; the incumbent is told."""
        if not self._adopt(choice):
            return False
        self.incumbent.offer(self.network.expand(choice), "prices and exact moves")
        return True

    def _price(self, prices: Array) -> None:
        self._cost = self.network.priced(prices)
        self.core.price(self._cost)

    def _timed(self, what: str, began: float) -> float:
        now = self.incumbent.seconds()
        self._spent[what] = self._spent.get(what, 0.0) + now - began
        return now

    def _round(self, prices: Array, choice: IndexArray, last: IndexArray | None) -> tuple[float, IndexArray]:
        """A bound under prices, and the cheaper of what messages tell and of what ``last`` moves to. ``choice``: where
        messages begin to tell, and end."""
        began = self.incumbent.seconds()
        self.rounds += 1
        self._price(prices)
        self.core.sweep(forward=True)
        bound = self.core.sweep(forward=False, choice=choice) - float(
            (prices * self.network.limits).sum() / self.network.whole
        )
        began = self._timed("messages", began)
        found = self.core.move(choice, rounds=2)
        if last is not None:
            moved = self.core.move(last, rounds=2)
            if self.network.value(moved, self._cost) < self.network.value(found, self._cost):
                found = moved
        self._timed("messages", began)
        self.incumbent.raise_bound(bound + self.network.graph.offset)
        return bound, found

    def _repair(self, choice: IndexArray, prices: Array) -> IndexArray | None:
        """A choice within the limit near one that is not: times over it get dearer until nothing is."""
        total, raised = float(prices.sum()), prices
        for count in range(settings.REPAIR_ROUNDS):
            over = np.maximum(self.network.excess(choice), 0.0)
            if not over.any():
                return choice
            raised = raised + total * settings.DEARER * 4.0**count * over / over.sum()
            self._price(raised)
            choice = self.core.move(choice, rounds=2)
            if (self.network.used(choice) <= self.network.limits).all():
                self._fit = raised
                self.offer(choice)
                return choice
        return None

    def _spend(self, choice: IndexArray, used: Array, prices: Array) -> bool:
        """The best parts of a move from a choice within the limit."""
        self._price(prices)
        moved = self.core.move(choice, rounds=1)
        ways = [crossover(self.network, choice, used, moved, prices, free_room=free) for free in (False, True)]
        return self.offer(min(ways, key=lambda way: way[2])[0])

    def _polish(self, prices: Array) -> None:
        """From the best choice: spend what is left, or free room where it is cheap and spend it where it is worth
        most."""
        assert self.best is not None
        waved = self._waved(prices, self._random.uniform(0.05, 0.6))
        if self._spend(self.best, self.used, waved):
            return
        dearer = float(np.exp(self._random.uniform(0.05, 0.6)))
        self._price(waved * dearer)
        freed = self.core.move(self.best, rounds=1)
        used = self.network.used(freed)
        if (used > self.network.limits).any():
            freed, used, _ = crossover(self.network, self.best, self.used, freed, waved * dearer, free_room=True)
        self._spend(freed, used, self._waved(prices, 0.2) / dearer)

    def _waved(self, prices: Array, spread: float) -> Array:
        """Prices times a smooth random factor over time."""
        knots = spread * self._random.standard_normal(12)
        wave = np.exp(np.interp(np.linspace(0, 11, len(prices)), np.arange(12), knots))
        return np.asarray(prices * wave, dtype=float)

    # -- prices ------------------------------------------------------------------------------------------------------

    def first(self) -> None:
        """A first choice within the limit, and prices to begin with."""
        if self._scale is not None:
            return
        choice = np.zeros(len(self.network.sizes), dtype=np.int64)
        _, free = self._round(np.zeros(len(self.network.limits)), choice, None)
        scale = self.network.value(free, self.network.cost) or 1.0
        least = self.network.least_excess()
        weights: Array = np.exp(settings.SHARPNESS * (least - least.max(initial=-np.inf)))
        weights /= weights.sum() or 1.0
        self.offer(free)
        for power in range(1, settings.REPAIR_ROUNDS if self.best is None else 1):
            prices = settings.FIRST_FACTOR**power * scale * weights
            _, found = self._round(prices, choice, None)
            if not self.offer(found):
                self._repair(found, prices)
            if self.best is not None:
                break
        self.core.forget()
        self.prices = scale * weights
        self._scale = scale

    def run(self, enough: Callable[[], bool], trace: Callable[[str], None] | None = None) -> None:
        """Better choices, bounds and prices until it is ``enough``."""
        network, core = self.network, self.core
        choice, last = np.zeros(len(network.sizes), dtype=np.int64), None
        prices, best_bound, best_prices = self.prices, -np.inf, self.prices
        if self.incumbent.objective - network.graph.offset < self.value and self.incumbent.choice is not None:
            self._adopt(network.project(self.incumbent.choice))
        step, stalled, count = settings.STEP, 0, 0
        bounds: list[float] = []
        average: Array | None = None
        pace, sign = np.ones(len(prices)), np.zeros(len(prices))
        while not enough():
            count += 1
            bound, last = self._round(prices, choice, last)
            stalled = 0 if bound > best_bound else stalled + 1
            if bound > best_bound:
                best_bound, best_prices = bound, prices
            excess = network.excess(last)
            self._use(last, excess, prices)
            bounds.append(best_bound)
            slow = len(bounds) > 10 and bounds[-1] - bounds[-10] < settings.NEAR * abs(bounds[-1])
            self._polish_for(settings.POLISHING[slow], best_prices, enough)
            if core.programs() < settings.MOST_MOVES and count % 4 == 0:
                core.add_program(self._random.uniform(0.3, 1.2))
            average = excess if average is None else 0.5 * (average + excess)
            pace = np.where(np.sign(average) == sign, np.minimum(pace * settings.FASTER, settings.FASTEST), 1.0)
            sign = np.sign(average)
            prices = prices * np.exp(step * np.clip(average * pace, -0.5, 1.0))
            if stalled >= settings.REPAIR_ROUNDS:
                step, stalled = max(step * settings.SHORTER, settings.LEAST_STEP), 0
                prices, pace = np.sqrt(prices * best_prices), np.ones(len(prices))
            prices = np.maximum(prices, LEAST_PRICE * prices.sum() / max(len(prices), 1))
            if trace is not None:
                trace(f"{count} bound {bound:.6g} ({best_bound:.6g}) over {excess.max():.4f} best {self.value:.6g}")
        self.prices = best_prices

    def _use(self, found: IndexArray, excess: Array, prices: Array) -> None:
        """Make of what the last round found a choice within the limit."""
        began = self.incumbent.seconds()
        share = self._spent.get("repair", 0.0) / max(self._spent["messages"], 1e-9)
        over = float(excess.max(initial=-np.inf))
        if not self.offer(found) and over > 0 and (share < 0.5 or self.best is None):
            repaired = self._repair(found, prices)
            if repaired is not None:
                self._spend(repaired, self.network.used(repaired), prices)
        began = self._timed("repair", began)
        if self.best is not None:
            self.offer(crossover(self.network, self.best, self.used, found, prices)[0])
        self._timed("polish", began)

    def _polish_for(self, share: float, prices: Array, enough: Callable[[], bool]) -> None:
        began = self.incumbent.seconds()
        goal = share * self._spent["messages"]
        while self.best is not None and self._spent.get("polish", 0.0) < goal and not enough():
            use_fit = self._fit is not None and self._random.random() < 0.5
            self._polish(self._fit if use_fit and self._fit is not None else prices)
            began = self._timed("polish", began)

    def usage_prices(self) -> UsagePrices:
        """The best prices found, in seconds a byte."""
        return UsagePrices(self.network.graph.times.astype(float), self.prices / self.network.whole)
