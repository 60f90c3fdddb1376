"""The ways to hold a value of the forward for the backward, each an action that a plan may choose.

An action knows what of a value lies in a device's memory, and from which event of the step to which; what it costs; how
a program does it; and the words that people read. Whatever plans, counts, runs or prints asks the action, so a further
way is one object that is registered here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from autopar.errors import AutoparError
from autopar.ir import ITEMSIZE, TensorMeta
from autopar.mesh import Link

StoreKind = Literal["offload", "encode"]
RestoreKind = Literal["fetch", "decode"]


class Event(Enum):
    """When memory is taken or given back: events of a step, and of one value in it."""

    START = "the step begins"
    FORWARD_DONE = "the forward is over"
    TURN = "the backward begins"
    BACKWARD_DONE = "the backward is over"
    END = "the optimizer has stepped"

    MADE = "its op has made it"
    READ = "it is read for the last time"
    LEFT = "the forward has read it for the last time"
    BACK = "it is restored for its first reader in the backward, and in memory"
    RESTORED = "it is restored for its first reader in the backward, and no more needed as it was stored"
    REMADE = "its op is run again"
    DONE = "the backward has read it for the last time"


class Lifetime(NamedTuple):
    """A tensor, or what belongs to one, is in device memory from one event to another, both included.

    Args:
        kind: as a memory profile calls it; empty for what is an activation or a temporary.
        size: what it is: a rank's shard, that shard as an action stores it, the whole tensor, or a parameter's
            optimizer state.
        times: how many of it there are.
    """

    kind: str
    size: Literal["shard", "stored", "whole", "optimizer"]
    born: Event
    dies: Event
    times: int = 1

    @property
    def throughout(self) -> bool:
        """Whether it is there for the whole step."""
        return self.born == Event.START and self.dies == Event.END


def _held(born: Event, dies: Event, size: Literal["shard", "stored"] = "shard") -> Lifetime:
    return Lifetime("activations", size, born, dies)


class Rates(NamedTuple):
    """What takes time beside the ops of the graph: copies to and from the host over a link, and passes over device
    memory, of ``launch_s`` and ``s_per_byte`` each."""

    host: Link
    launch_s: float
    s_per_byte: float


@dataclass(frozen=True, eq=False)
class Action:
    """A way to hold a value.

    Args:
        name: identifies it, as in a saved plan.
        text: what people read of a value so held, as in "3 kept".
        lifetimes: when device memory holds the value.
        of_forward: whether what is held comes from what the forward has made.
        remakes: whether the value's op is run again in the backward.
    """

    name: str
    text: str = ""
    lifetimes: tuple[Lifetime, ...] = ()
    of_forward: bool = False
    remakes: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Action) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, eq=False)
class Stored(Action):
    """A way that stores a value in another place or form as soon as it is made, and restores it before its first
    reader in the backward.

    Args:
        on_host: whether host memory has it meanwhile. Copies to there and back run beside the computation.
    """

    of_forward: bool = True
    on_host: bool = False

    @property
    def kinds(self) -> tuple[StoreKind, RestoreKind]:
        """The kinds of the program's ops that store and restore."""
        raise NotImplementedError

    @property
    def suffix(self) -> str:
        """What is added to the name of a stored tensor."""
        return "host" if self.on_host else self.name.replace(" ", "_")

    def serves(self, meta: TensorMeta) -> bool:
        """Whether a tensor can be stored so."""
        raise NotImplementedError

    def form(self, meta: TensorMeta) -> TensorMeta:
        """Return what a tensor of ``meta`` is while it is stored."""
        raise NotImplementedError

    def seconds(self, whole: float, stored: float, rates: Rates) -> float:
        """Return the seconds to store a shard of ``whole`` bytes, which takes ``stored`` bytes then, and as many to
        restore it."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Offloaded(Stored):
    """Copied to the host and back, beside the computation (as in Rhu et al., vDNN, 2016)."""

    lifetimes: tuple[Lifetime, ...] = (_held(Event.BACK, Event.DONE),)
    on_host: bool = True

    @property
    def kinds(self) -> tuple[StoreKind, RestoreKind]:
        return "offload", "fetch"

    def serves(self, meta: TensorMeta) -> bool:
        return True

    def form(self, meta: TensorMeta) -> TensorMeta:
        return meta

    def seconds(self, whole: float, stored: float, rates: Rates) -> float:
        return rates.host.copy_seconds(whole)


@dataclass(frozen=True, eq=False)
class Encoded(Stored):
    """Stored on the device as a tensor of the same shape in a smaller dtype.

    Args:
        dtype: of the stored tensor.
        encode: the op that stores, as ``namespace::name``; it takes the tensor, and keeps its strides.
        decode: the op that restores; it takes the stored tensor and the dtype that the value had.
    """

    lifetimes: tuple[Lifetime, ...] = (
        _held(Event.MADE, Event.RESTORED, "stored"),
        _held(Event.BACK, Event.DONE),
    )
    dtype: str = field(kw_only=True)
    encode: str = field(kw_only=True)
    decode: str = field(kw_only=True)

    @property
    def kinds(self) -> tuple[StoreKind, RestoreKind]:
        return "encode", "decode"

    def serves(self, meta: TensorMeta) -> bool:
        return "float" in meta.dtype and meta.itemsize > ITEMSIZE[self.dtype]

    def form(self, meta: TensorMeta) -> TensorMeta:
        return meta._replace(dtype=self.dtype)

    def seconds(self, whole: float, stored: float, rates: Rates) -> float:
        return rates.launch_s + rates.s_per_byte * (whole + stored)


KEEP = Action("keep", "kept", (_held(Event.LEFT, Event.DONE),), of_forward=True)
RECOMPUTE = Action("recompute", "recomputed", (_held(Event.REMADE, Event.DONE),), remakes=True)
OFFLOAD = Offloaded("offload", "offloaded")
ABSENT = Action("absent")
"""The backward does without the value."""

ACTIONS = {action.name: action for action in (KEEP, RECOMPUTE, OFFLOAD)}
"""The ways that plans name and the search may choose, by name."""


def stores() -> tuple[Stored, ...]:
    """Return the ways to store a value that the search may choose."""
    return tuple(action for action in ACTIONS.values() if isinstance(action, Stored))


def register(action: Stored) -> None:
    """Let plans hold values by ``action`` too, wherever they can and that is cheapest.

    Raises:
        AutoparError: there is another action of its name.
    """
    if ACTIONS.get(action.name, action) is not action:
        raise AutoparError(
            f"There is already an action {action.name!r}.",
            found=repr(ACTIONS[action.name].text),
            hint="give the new one another name.",
        )
    ACTIONS[action.name] = action


@contextmanager
def registered(action: Stored) -> Iterator[None]:
    """Let plans hold values by ``action`` too, inside the context."""
    known = action.name in ACTIONS
    register(action)
    try:
        yield
    finally:
        if not known:
            del ACTIONS[action.name]
