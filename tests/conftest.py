"""Shared fixtures: the tiny base policy (made once, cached) and where the shared data files are."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The scripts, found by the run that each of them opens: a new one needs no list.
SCRIPTS = sorted(p.stem for p in ROOT.glob("*.py") if f'Run("{p.stem}", ' in p.read_text())
RL_SCRIPTS = [name for name in SCRIPTS if name != "sft"]

# Settings of a run that takes seconds, through the same code as any other run.
SMALL = [
    *("--num-steps", "2", "--eval-every", "2", "--save-every", "1", "--eval-problems", "8"),
    *("--prompts-per-step", "4", "--gen-prompts", "6", "--group-size", "4"),
    *("--minibatch-size", "8", "--rollout-engine", "hf"),
]


@pytest.fixture(scope="session")
def base_policy() -> str:
    """Folder of the tiny base policy; the first test run trains it."""
    import tiny

    return tiny.base_policy()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the shared data files, which are not part of the repository."""
    folder = Path(os.environ.get("CLEANREASON_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no shared data in {folder}; set CLEANREASON_SHARED")
    return folder
