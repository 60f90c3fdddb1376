"""Joining a job: creates the process group from the variables that a launcher sets."""

from __future__ import annotations

import datetime as dt
import os
import random
import re
import time
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autopar.errors import RankError
from autopar.training.communication import DistCoordinator

Store = Any  # torch.distributed.Store, which torch hides from type checkers
TIMEOUT_S = 600.0
"""Seconds that a collective waits for a missing rank before the job ends with an error."""


@dataclass(frozen=True)
class Place:
    """This process's position in the job, and the address of rank 0."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int


def launch_from_torch(
    backend: str | None = None, seed: int = 1024, verbose: bool = True, timeout_s: float = TIMEOUT_S
) -> DistCoordinator:
    """Join the job that ``torchrun`` started.

    Args:
        backend: None means nccl if there is a GPU, else gloo.
        seed: seeds Python's, numpy's and torch's generators, the same on every rank.
        verbose: whether rank 0 prints a line about the job.
        timeout_s: seconds after which a collective gives up on a missing rank.

    Raises:
        RankError: a variable is missing or not a number, or there is already a process group.
    """
    start = "torchrun --nproc-per-node 2 train.py"
    place = Place(
        _integer("RANK", "torchrun", start),
        _integer("LOCAL_RANK", "torchrun", start),
        _integer("WORLD_SIZE", "torchrun", start),
        _text("MASTER_ADDR", "torchrun", start),
        _integer("MASTER_PORT", "torchrun", start),
    )
    return _join(place, "torchrun", backend, seed, verbose, timeout_s)


def launch_from_slurm(
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> DistCoordinator:
    """Join the job whose processes ``srun`` started.

    Args:
        host: host name of rank 0; None means MASTER_ADDR, or the first machine of SLURM_JOB_NODELIST.
        port: the port of rank 0; None means MASTER_PORT, or one derived from SLURM_JOB_ID, so that jobs do not collide.
        backend, seed, verbose, timeout_s: as in ``launch_from_torch``.

    Raises:
        RankError: as in ``launch_from_torch``.
    """
    start = "srun --ntasks 8 python train.py"
    rank, size = _integer("SLURM_PROCID", "srun", start), _first_of(("SLURM_NTASKS", "SLURM_NPROCS"), "srun", start)
    local = _integer("SLURM_LOCALID", "srun", start)
    if host is None:
        host = os.environ.get("MASTER_ADDR") or first_host(_text("SLURM_JOB_NODELIST", "srun", start))
    if port is None:
        given = os.environ.get("MASTER_PORT")
        job = "" if given else _text("SLURM_JOB_ID", "srun", start)
        port = _number("MASTER_PORT", given) if given else 20000 + zlib.crc32(job.encode()) % 20000
    return _join(Place(rank, local, size, host, port), "srun", backend, seed, verbose, timeout_s)


def launch_from_openmpi(
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> DistCoordinator:
    """Join the job whose processes Open MPI's ``mpirun`` started.

    Args:
        host: host name of rank 0; None means MASTER_ADDR.
        port: the port of rank 0; None means MASTER_PORT.
        backend, seed, verbose, timeout_s: as in ``launch_from_torch``.

    Raises:
        RankError: as in ``launch_from_torch``.
    """
    start = "mpirun -n 8 -x MASTER_ADDR=node0 -x MASTER_PORT=29500 python train.py"
    place = Place(
        _integer("OMPI_COMM_WORLD_RANK", "mpirun", start),
        _integer("OMPI_COMM_WORLD_LOCAL_RANK", "mpirun", start),
        _integer("OMPI_COMM_WORLD_SIZE", "mpirun", start),
        _text("MASTER_ADDR", "mpirun", start) if host is None else host,
        _integer("MASTER_PORT", "mpirun", start) if port is None else port,
    )
    return _join(place, "mpirun", backend, seed, verbose, timeout_s)


def first_host(nodes: str) -> str:
    """Return the first machine of a SLURM list: ``node[03-05,9],gpu1`` begins with ``node03``.

    Raises:
        RankError: the text is not a node list.
    """
    match = re.fullmatch(r"([^\[\],]+)(?:\[(\d+)[^\]]*\]([^\[\],]*))?(?:,.*)?", nodes.strip())
    if match is None:
        raise RankError(
            "SLURM_JOB_NODELIST cannot be parsed.",
            found=repr(nodes),
            hint="name the first machine: launch_from_slurm(host=...).",
        )
    return match[1] + (match[2] or "") + (match[3] or "")


def _join(
    place: Place, launcher: str, backend: str | None, seed: int, verbose: bool, timeout_s: float
) -> DistCoordinator:
    if dist.is_initialized():
        raise RankError(
            "This process has already joined a job.",
            found=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            hint="launch once, before anything else creates a process group.",
        )
    if not 0 <= place.rank < place.world_size:
        raise RankError(
            "The rank does not fit the size of the job.",
            found=f"rank {place.rank} of {place.world_size}, from {launcher}",
            hint="start all processes with one launcher.",
        )
    _publish(place)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    timeout = dt.timedelta(seconds=timeout_s)
    store = fresh_store(_shared_store(place, timeout), place.rank, place.world_size, timeout)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    set_seed(seed)
    coordinator = DistCoordinator()
    if verbose:
        coordinator.print_on_master(f"{place.world_size} ranks joined over {backend}, started by {launcher}")
    return coordinator


def _shared_store(place: Place, timeout: dt.timedelta) -> Store:
    """Return the launcher's store if it has one, as torchrun's agents do, else one that rank 0 opens."""
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))  # type: ignore[attr-defined]
    return store


def fresh_store(store: Store, rank: int, world_size: int, timeout: dt.timedelta) -> Store:
    """Return a section of ``store``, the same on all ranks, to which nothing has been written yet.

    torchrun's agents keep one store across restarts, so a restarted rank would find the addresses of processes that are
    gone, and wait for them. Restart counts differ between machines, so the ranks agree explicitly: each asks with a
    random word that only this process knows, and rank 0 answers under that word with the section's name.

    Raises:
        RankError: not every rank arrived in time.
    """
    if rank != 0:
        word = uuid.uuid4().hex
        store.set(f"autopar/asks/{rank}", word)
        try:
            store.wait([f"autopar/told/{word}"], timeout)
        except RuntimeError as error:
            raise _join_timeout("rank 0", timeout) from error
        name = store.get(f"autopar/told/{word}").decode()
        store.add(f"autopar/knows/{name}", 1)
        return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    name, answered, deadline_s = uuid.uuid4().hex, set[bytes](), time.monotonic() + timeout.total_seconds()
    while store.add(f"autopar/knows/{name}", 0) < world_size - 1:
        for other in range(1, world_size):
            asks = f"autopar/asks/{other}"
            if store.check([asks]) and (word_of := store.get(asks)) not in answered:
                answered.add(word_of)
                store.set(f"autopar/told/{word_of.decode()}", name)
        if time.monotonic() > deadline_s:
            raise _join_timeout(f"some of the {world_size - 1} other ranks", timeout)
        time.sleep(0.01)
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _join_timeout(who: str, timeout: dt.timedelta) -> RankError:
    return RankError(
        "Not every rank joined the job in time.",
        found=f"no word from {who} within {timeout.total_seconds():g} s",
        hint="check that all processes were started, and that they can reach MASTER_ADDR and MASTER_PORT.",
    )


def set_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  data sets draw from the global generator
    torch.manual_seed(seed)


def _publish(place: Place) -> None:
    """Set the environment variables that torch reads, whatever launcher started the job."""
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.local_rank),
        WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=place.host,
        MASTER_PORT=str(place.port),
    )


def _integer(name: str, launcher: str, start: str) -> int:
    return _number(name, _text(name, launcher, start))


def _first_of(names: Sequence[str], launcher: str, start: str) -> int:
    name = next((n for n in names if n in os.environ), names[0])
    return _integer(name, launcher, start)


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text.strip()):
        raise RankError(
            f"The environment variable {name} is not a number.", found=repr(text), hint="let the launcher set it."
        )
    return int(text)


def _text(name: str, launcher: str, start: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise RankError(
            f"The environment variable {name} is not set; {launcher} sets it.",
            found=f"{name}={value!r}" if value is not None else f"no {name} in the environment",
            hint=f"start the program with {start}.",
        )
    return value
