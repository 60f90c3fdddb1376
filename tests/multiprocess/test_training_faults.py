"""Ranks that die, raise or hang end the job with the first error, and torchrun goes on from the last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.errors import AutoparError
from autopar.training import set_seed, watchdog
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_run import trained

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.2"]


def run(folder: Path, ranks: int, steps: int, fault: str = "none:0:-1", restarts: int = 0, timeout_s: float = 60.0):
    command = [*TORCHRUN, f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "-m"]
    command += ["tests.multiprocess.training_run", str(folder), str(steps)]
    environment = {**os.environ, "FAULT": fault, "TIMEOUT": str(timeout_s), "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return finished(command, environment)


def finished(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, but where it takes too long its children are ended too."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes) as process:
        try:
            out, error = process.communicate(timeout=200)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def losses(text: str) -> dict[int, float]:
    said = [json.loads(line.partition("LOSS ")[2]) for line in text.splitlines() if "LOSS " in line]
    return {each["step"]: each["loss"] for each in said}


def _undisturbed(folder: str) -> dict[int, float]:
    set_seed(1)  # as the script does
    return trained(Path(folder), 8)


def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_nothing_had_been(pool: RankPool, tmp_path: Path):
    whole, _ = pool.run(_undisturbed, str(tmp_path / "whole"))
    assert list(whole) == list(range(8))
    failed = run(tmp_path / "failed", 2, 8, fault="kill:1:5", restarts=1)
    assert failed.returncode == 0, failed.stderr
    assert (tmp_path / "failed" / "failed").exists()
    assert losses(failed.stdout) == whole
    fewer = run(tmp_path / "failed", 1, 10)
    assert fewer.returncode == 0, fewer.stderr
    assert list(losses(fewer.stdout)) == [8, 9]


def test_an_error_on_one_rank_ends_all_and_is_shown(tmp_path: Path):
    done = run(tmp_path, 2, 8, fault="raise:1:2")
    assert done.returncode != 0
    assert "rank 1 failed" in done.stderr
    assert "ValueError: the first error of all" in done.stderr.partition("Root Cause")[2]


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_within_the_timeout(tmp_path: Path):
    done = run(tmp_path, 2, 8, fault="hang:1:2", timeout_s=8.0)
    assert done.returncode != 0
    assert "rank 0 failed" in done.stderr
    assert "imed out" in done.stderr


def test_a_watchdog_ends_a_process_that_hangs_and_shows_where():
    program = """
import time
from autopar.training import set_seed, watchdog
def stuck():
    time.sleep(600)
with watchdog(60.0) as beat:
    beat()
with watchdog(4.0) as beat:
    for _ in range(3):
        time.sleep(0.2)
        beat()
    print("beating", flush=True)
    stuck()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stdout == "beating\n"
    assert "in stuck" in done.stderr


def test_a_watchdog_needs_a_time():
    with pytest.raises(AutoparError, match="positive"), watchdog(0):
        pass
