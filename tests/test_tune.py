"""A real sweep from the command to the files, and what becomes of one that is killed or interrupted."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.machine.machine import Machine
from autotune.probe.torchrun.launcher import environment
from autotune.workload.workload import Workload
from tests.commands import Run, autotune, python, start

pytestmark = pytest.mark.probes

MODEL = (
    "machine=cpu",
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.vocab_size=8192",
    "workload.seq_len=256",
    "workload.global_batch=16",
)
QUICK = ("probe.steps=2", "probe.confirm_steps=3", "objective.finalists=2", "probe.stop_losers=false")
PLAIN = ("space.offload_optimizer=none", "space.offload_param=none", "space.checkpoint_blocks=none")
SWEEP = (*MODEL, *QUICK, *PLAIN, "space.micro_batch=[1,8]", "space.zero_stage=[1,2]")
"""Of four candidates two need more than the 0.125 GiB of an emulated device: the logits of 8 × 256 tokens."""
STUDY = "gpt_tiny-cpu"

FIELDS = {
    *("trial", "key", "candidate", "outcome", "phase", "tokens_per_s", "step_s", "peak_allocated_bytes"),
    *("peak_reserved_bytes", "host_peak_bytes", "probe_kind", "wall_s", "inferred", "reused", "confirmation"),
}

AND_TELL = """
import sys
from autotune.cli import main
code = main(sys.argv[1:])
print("loaded:", *(name for name in ("torch", "deepspeed", "transformers") if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""
TIME = re.compile(r"\d\d:\d\d:\d\d ")


@dataclass
class Swept:
    """A finished sweep and its folder."""

    folder: Path
    run: Run
    trials: list[dict[str, Any]]

    @property
    def files(self) -> Path:
        return self.folder / "studies" / STUDY


@dataclass
class Ended:
    """A sweep that was ended in the middle of its second probe, and what was stored by then."""

    folder: Path
    run: Run
    trials: list[dict[str, Any]]


def trials(folder: Path, study: str = STUDY) -> list[dict[str, Any]]:
    """What `trials` lists."""
    listed = autotune(folder, "trials", study, "--format", "json").finish()
    assert (listed.code, listed.err) == (0, "")
    rows: list[dict[str, Any]] = json.loads(listed.out)
    return rows


def search_rows(rows: list[dict[str, Any]]) -> Counter[str]:
    """How many rows of the search each candidate has."""
    return Counter(row["key"] for row in rows if not row["confirmation"])


def end(folder: Path, run: Run, number: signal.Signals) -> Ended:
    """Send a signal to a sweep while the ranks of its second probe are at work."""
    run.until(" probe 2: ")
    deadline = time.monotonic() + 20
    while (ranks := sum(map(is_rank, run.living()))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    run.process.send_signal(number)
    run.finish()
    assert ranks >= 2
    assert run.left == []
    return Ended(folder, run, trials(folder))


def is_rank(process: psutil.Process) -> bool:
    """Whether a process was forked by the fork server, or by a rank."""
    try:
        parent = process.parent()
        return parent is not None and "multiprocessing.forkserver" in " ".join(parent.cmdline())
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Ended]:
    """Two sweeps at the same time, one killed and one interrupted, each in its second probe."""
    folders = [tmp_path_factory.mktemp(name) for name in ("swept", "interrupted")]
    runs = [autotune(folder, *SWEEP) for folder in folders]
    with ThreadPoolExecutor() as pool:
        killed, interrupted = pool.map(end, folders, runs, (signal.SIGKILL, signal.SIGINT))
    return killed, interrupted


@pytest.fixture(scope="module")
def killed(ended: tuple[Ended, Ended]) -> Ended:
    return ended[0]


@pytest.fixture(scope="module")
def interrupted(ended: tuple[Ended, Ended]) -> Ended:
    return ended[1]


@pytest.fixture(scope="module")
def swept(killed: Ended) -> Swept:
    """The same command after the kill, to its end."""
    run = python(killed.folder, AND_TELL, *SWEEP).finish()
    assert run.code == 0, run.err
    return Swept(killed.folder, run, trials(killed.folder))


# -- killed, interrupted, taken up again ----------------------------------------------------------------------------


def test_a_killed_tuner_has_kept_what_it_measured(killed: Ended) -> None:
    assert killed.run.code == -signal.SIGKILL
    assert [row["outcome"] for row in killed.trials] == ["ok"]


def test_an_interrupted_tuner_says_how_to_go_on(interrupted: Ended) -> None:
    assert interrupted.run.code == 130
    assert interrupted.run.out == ""
    sentence, hint = interrupted.run.err.splitlines()[-2:]
    assert sentence == "interrupted"
    [command] = re.findall(r"everything measured is saved; `python -m autotune (.*)` goes on", hint)
    assert shlex.split(command) == list(SWEEP)
    assert [row["outcome"] for row in interrupted.trials] == ["ok"]


def test_the_next_run_goes_on_after_a_kill_and_repeats_nothing(killed: Ended, swept: Swept) -> None:
    assert re.search(r"4 candidates, 1 of them tried already; .* 1 of them spent", swept.run.err)
    assert [int(number) for number in re.findall(r" probe (\d+): ", swept.run.err)] == [2, 3, 4]
    assert swept.trials[:1] == killed.trials
    assert sorted(search_rows(swept.trials).values()) == [1, 1, 1, 1]


# -- a sweep ------------------------------------------------------------------------------------------------------


def test_a_sweep_ends_with_the_two_files_and_no_process_left(swept: Swept) -> None:
    assert sorted(path.name for path in swept.files.iterdir()) == ["deepspeed_config.json", "recipe.json"]
    assert sorted(path.name for path in (swept.folder / "studies").iterdir()) == ["autotune.db", STUDY]
    assert sorted(path.name for path in swept.folder.iterdir()) == ["studies"]
    assert swept.run.left == []


def test_the_controller_never_imports_torch(swept: Swept) -> None:
    assert swept.run.err.splitlines()[-1] == "loaded:"


def test_the_summary_alone_goes_to_stdout_and_progress_alone_to_stderr(swept: Swept) -> None:
    assert swept.run.out.startswith(f"study      {STUDY}: ")
    assert "ended: every candidate is tried" in swept.run.out
    assert not [line for line in swept.run.out.splitlines() if TIME.match(line)]
    assert swept.run.out.splitlines()[-2:] == [f"studies/{STUDY}/deepspeed_config.json", f"studies/{STUDY}/recipe.json"]
    progress = swept.run.err.splitlines()[:-1]
    assert [line for line in progress if not TIME.match(line)] == []
    assert any("probe 2: mb 8 × acc 1  z1  bf16 (at most 2 more" in line for line in progress)
    assert any("confirmation 1 of 2" in line for line in progress)


def test_the_summary_compares_the_winner_with_the_untuned_default(swept: Swept) -> None:
    out = swept.run.out
    assert "the untuned default" in out
    assert re.search(r"^gain +\S", out, re.MULTILINE)
    assert re.search(r"^winner +mb 1 × acc 8  z[12]  bf16 ", out, re.MULTILINE)
    assert re.search(r"^24 combinations\n-20 checkpoint_nothing: .*\n 4 candidates$", out, re.MULTILINE)


def test_candidates_run_out_of_memory_for_real(swept: Swept) -> None:
    ooms = [row for row in swept.trials if row["outcome"] == "oom_device"]
    assert {row["candidate"]["zero_stage"] for row in ooms} == {1, 2}
    for row in ooms:
        assert row["candidate"]["micro_batch"] == 8
        assert row["phase"] in ("forward", "backward")
        assert "allocate" in row["message"]
        assert not row["inferred"]
        assert row["wall_s"] > 0


def test_the_winner_is_among_the_confirmations(swept: Swept) -> None:
    [winner] = [row for row in swept.trials if row["winner"]]
    assert winner["confirmation"]
    assert winner["outcome"] == "ok"
    assert winner["tokens_per_s"] == max(row["tokens_per_s"] for row in swept.trials if row["confirmation"])
    recipe = json.loads((swept.files / "recipe.json").read_text())
    assert (recipe["trial"], recipe["key"], recipe["candidate"]) == (
        winner["trial"],
        winner["key"],
        winner["candidate"],
    )


# -- its study, read ------------------------------------------------------------------------------------------------


def test_trials_tells_what_was_measured_in_three_formats(swept: Swept) -> None:
    for row in swept.trials:
        assert row.keys() >= FIELDS
    measured = [row for row in swept.trials if row["outcome"] == "ok"]
    for row in measured:
        assert row["probe_kind"] == "torchrun"
        assert row["tokens_per_s"] == pytest.approx(16 * 256 / row["step_s"])
        assert 0 < row["peak_allocated_bytes"] <= 0.125 * 2**30
        assert row["host_peak_bytes"] > 0
    listed = autotune(swept.folder, "trials", STUDY, "--format", "csv"), autotune(swept.folder, "trials", STUDY)
    comma, table = (run.finish().out for run in listed)
    rows = list(csv.DictReader(io.StringIO(comma)))
    assert [int(row["trial"]) for row in rows] == [row["trial"] for row in swept.trials]
    assert [json.loads(row["candidate"]) for row in rows] == [row["candidate"] for row in swept.trials]
    assert table.count("oom_device in ") == 2
    assert len(re.findall(r"confirmation, winner", table)) == 1


def test_any_trial_can_be_exported(swept: Swept, tmp_path: Path) -> None:
    stage2 = next(row for row in swept.trials if row["candidate"]["zero_stage"] == 2 and row["outcome"] == "ok")
    exported = [
        autotune(swept.folder, "export", STUDY, "--trial", str(stage2["trial"]), "--out", str(tmp_path / "two")),
        autotune(swept.folder, "export", STUDY, "--out", str(tmp_path / "winner")),
    ]
    assert [run.finish().code for run in exported] == [0, 0]
    config = json.loads((tmp_path / "two" / "deepspeed_config.json").read_text())
    assert config["zero_optimization"]["stage"] == 2
    assert exported[0].out.splitlines() == [
        str(tmp_path / "two" / name) for name in ("deepspeed_config.json", "recipe.json")
    ]
    for name in ("deepspeed_config.json", "recipe.json"):
        assert (tmp_path / "winner" / name).read_text() == (swept.files / name).read_text()


# -- what follows it ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def again(swept: Swept) -> tuple[Run, Run]:
    """The same command, and the same with another study's name, at the same time."""
    both = autotune(swept.folder, *SWEEP), autotune(swept.folder, *SWEEP, "study.name=second")
    return both[0].finish(), both[1].finish()


def test_the_same_command_repeats_nothing(swept: Swept, again: tuple[Run, Run]) -> None:
    run, _ = again
    assert run.code == 0
    assert re.search(r"4 candidates, 4 of them tried already; .* 4 of them spent", run.err)
    assert "search ended: every candidate is tried" in run.err
    assert not re.search(r"probe \d+:|confirmation \d+ of", run.err)
    assert run.out == swept.run.out
    assert trials(swept.folder) == swept.trials


def test_another_study_of_the_same_takes_over_every_measurement(swept: Swept, again: tuple[Run, Run]) -> None:
    _, run = again
    assert run.code == 0
    assert not re.search(r"probe \d+:|confirmation \d+ of", run.err)
    rows = trials(swept.folder, "second")
    assert len(rows) == len(swept.trials)
    assert all(row["reused"] for row in rows)
    assert {row["key"]: row["tokens_per_s"] for row in rows} == {
        row["key"]: row["tokens_per_s"] for row in swept.trials
    }


def test_two_studies_are_listed_and_compared(swept: Swept, again: tuple[Run, Run]) -> None:
    reading = (
        autotune(swept.folder, "studies", "--format", "json"),
        autotune(swept.folder, "compare", STUDY, "second"),
    )
    studies, compared = (run.finish() for run in reading)
    assert [row["study"] for row in json.loads(studies.out)] == [STUDY, "second"]
    assert compared.code == 0
    assert "no significant difference" in compared.out


def test_another_workload_in_the_study_is_refused_before_anything_starts(swept: Swept) -> None:
    run = autotune(swept.folder, *SWEEP, "workload.seq_len=128").finish()
    assert run.code == 2
    assert run.err.splitlines() == [
        f"error: study {STUDY} holds another workload: workload.seq_len 256 → 128",
        "hint: study.name=… starts a new study; its own settings go on with this one",
    ]


@pytest.fixture(scope="module")
def further(swept: Swept, again: tuple[Run, Run]) -> tuple[Run, Run]:
    """Another space in the study, and meanwhile a training with the file that the first sweep wrote."""
    names = ("PATH", "DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR", "OMP_NUM_THREADS", "PYTHONWARNINGS")
    ours = environment(Machine(accelerator="cpu"), Workload(), threads=1)  # what is compiled is compiled once
    script, config = Path(__file__).parent / "data" / "train.py", swept.files / "deepspeed_config.json"
    training = start(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(config)],
        swept.folder,
        **{name: ours[name] for name in names},
    )
    other = autotune(swept.folder, *SWEEP, "space.micro_batch=[1,2,8]", "space.zero_stage=2")
    return other.finish(), training.finish()


def test_another_space_is_welcome_in_the_study_and_tries_only_what_is_new(
    swept: Swept, further: tuple[Run, Run]
) -> None:
    run, _ = further
    assert run.code == 0, run.err
    assert len(re.findall(r"probe \d+:", run.err)) == 1
    assert "probe 1: mb 2 × acc 4  z2  bf16" in run.err
    rows = trials(swept.folder)
    assert rows[: len(swept.trials)] == [{**row, "winner": rows[i]["winner"]} for i, row in enumerate(swept.trials)]
    assert sorted(search_rows(rows).values()) == [1, 1, 1, 1, 1]


def test_the_emitted_config_trains_the_model(further: tuple[Run, Run]) -> None:
    _, training = further
    assert training.code == 0, training.err
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+)$", training.out, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(math.log(8192), rel=0.05)
    assert losses[2] < losses[1] < losses[0]
