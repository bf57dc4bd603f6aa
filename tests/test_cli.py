"""The command line: what it answers, and what it says when it is given what cannot be."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from autotune.cli import VERBS, main
from autotune.machine.machine import Machine
from autotune.override import names
from autotune.settings import Settings, config_dir
from autotune.store.store import Store
from autotune.usage import usage
from autotune.workload.workload import Workload
from tests.commands import Run, autotune, python, start

EXAMPLE = Path(__file__).parent / "data" / "example_config.json"
HEAVY = ("torch", "deepspeed", "hydra", "optuna", "sqlalchemy", "transformers")


def run(folder: Path, *arguments: str, **environ: str) -> Run:
    return autotune(folder, *arguments, **environ).finish()


@pytest.fixture
def signals() -> Iterator[None]:
    """The program sets handlers of its own."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGPIPE)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


# -- help ---------------------------------------------------------------------------------------------------------


def test_help_answers_at_once_and_imports_nothing_heavy(tmp_path: Path) -> None:
    began = time.monotonic()
    code = f"""
import sys
from autotune.cli import main
code = main(["--help"])
print("loaded:", *(name for name in {HEAVY} if name in sys.modules))
sys.exit(code)
"""
    helped = python(tmp_path, code).finish()
    assert time.monotonic() - began < 3  # it takes a twentieth of a second where nobody else is at work
    assert (helped.code, helped.err) == (0, "")
    assert helped.out.endswith("loaded:\n")
    assert helped.out.startswith(usage())


def test_help_names_every_verb_section_group_and_option() -> None:
    text = usage()
    for verb in VERBS:
        assert f"python -m autotune {verb}" in text or verb == "tune"
    for section in fields(Settings):
        assert re.search(rf"^  {section.name} ", text, re.MULTILINE), section.name
    for group in (folder for folder in config_dir().iterdir() if folder.is_dir()):
        options = re.search(rf"^  {group.name} +(\S.*(?:\n {{8,}}\S.*)*)", text, re.MULTILINE)
        assert options, group
        named = {option.strip() for option in options[1].replace("\n", " ").split(",")}
        assert named == {path.stem for path in group.glob("*.yaml")}, group


def test_every_setting_that_help_names_exists() -> None:
    known = names(Settings)
    sections = usage().partition("Sections (")[2].partition("Examples:")[0]
    told = 0
    for line in re.findall(r"^  (\w+ +\S.*(?:\n {8,}\w+,.*)*)", sections, re.MULTILINE):
        section, _, rest = line.partition(" ")
        if section == "output":
            continue
        for key in re.sub(r"\([^)]*\)|…", "", rest).replace("\n", " ").split(","):
            assert not key.strip() or f"{section}.{key.strip()}" in known, key
            told += 1
    assert told > 30


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str], signals: None) -> None:
    try:
        code = main([verb, "--help"])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 0
    out = capsys.readouterr().out
    assert verb in out
    assert "usage:" in out or out.strip() == usage()


@dataclass(frozen=True)
class Refused:
    """What is given, the exit code, and what must be said (as patterns) in the sentence and in the hint."""

    given: tuple[str, ...]
    code: int
    sentence: str
    hint: str = "."


REFUSED = {
    "an unknown model": Refused(("model=nope",), 2, "model=nope", "gpt_tiny.*llama3_8b"),
    "a misspelt knob": Refused(("space.micro_bach=4",), 2, r"space\.micro_bach", r"did you mean space\.micro_batch\?"),
    "a misspelt knob, added": Refused(("+space.micro_bach=4",), 2, r"space\.micro_bach", r"space\.micro_batch\?"),
    "a knob without its section": Refused(("micro_batch=4",), 2, "micro_batch", r"space\.micro_batch\?"),
    "a stage that there is not": Refused(("space.zero_stage=7",), 2, r"zero_stage.* 7.* 0 to 3"),
    "a batch that nothing divides": Refused(
        ("machine=cpu", "workload.global_batch=7"), 2, "divides workload.global_batch=7 on 2", "global_batch=6.*=8"
    ),
    "a word for a number": Refused(("budget.probes=many",), 2, "budget.probes=many .*Integer"),
    "an unreachable database": Refused(
        ("machine=cpu", "study.store=postgresql://me:h0tpotato@127.0.0.1:{port}/db"), 5, "127.0.0.1.*refused", "server"
    ),
    "a database URL with =": Refused(
        ("study.store=postgresql://me@host/db?sslmode=require",), 2, "must be quoted", "both quotes"
    ),
    "a name with =": Refused(("study.name=a=b",), 2, "study.name=a=b", "quote"),
    "a corrupt database": Refused(
        ("machine=cpu", "study.store=sqlite:///corrupt.db"), 5, "corrupt.db is not a SQLite database", "another file"
    ),
    "no devices": Refused(("machine.devices_per_node=0",), 2, "no devices", "at least 1"),
    "tensor parallelism": Refused(("workload.tensor_parallel=2",), 2, "tensor_parallel=2 is not supported", "at 1"),
    "sequence parallelism": Refused(("workload.sequence_parallel=2",), 2, "sequence_parallel=2 is not supported"),
    "a machine that is not here": Refused(
        ("machine=b200", "probe=torchrun"), 2, "machine=b200 has NVIDIA B200", "probe=virtual"
    ),
    "an unknown probe": Refused(("probe.name=crystal",), 2, "probe=crystal is unknown", "virtual"),
    "an unknown launcher": Refused(("launcher=nonsense",), 2, "launcher=nonsense", "cold, hosts, slurm, warm"),
    "an unknown flag": Refused(("--frobnicate",), 2, "--frobnicate", "--help"),
    "a misspelt verb": Refused(("trails", "mine"), 2, "trails", "did you mean trials"),
    "a factory without a function": Refused(("model=custom", "model.factory=mine"), 2, "names no function", "module:"),
    "a format that there is not": Refused(("trials", "x", "--format", "xml"), 2, "xml.*json", "trials --help"),
    "a study that there is not, listed": Refused(("trials", "nope", "--store", "sqlite:///one.db"), 2, "nope", "one"),
    "a study that there is not, exported": Refused(("export", "nope", "--store", "sqlite:///one.db"), 2, "nope", "one"),
    "a study that there is not, compared": Refused(
        ("compare", "one", "nope", "--store", "sqlite:///one.db"), 2, "nope", "one"
    ),
    "a study compared with nothing": Refused(("compare", "one", "--store", "sqlite:///one.db"), 2, "two studies"),
    "a study without a winner": Refused(("export", "one", "--store", "sqlite:///one.db"), 2, "no winner", "trials one"),
    "a trial that there is not": Refused(
        ("export", "one", "--trial", "9", "--store", "sqlite:///one.db"), 2, "no trial 9", "trials one"
    ),
    "a folder that cannot be made": Refused(("machine=cpu", "output=/proc/here"), 5, "cannot be made", "output="),
    "no store": Refused(("studies",), 5, r"no store at sqlite:///studies/autotune.db", "AUTOTUNE_STORE"),
    "a config that is no JSON": Refused(("check", "corrupt.db"), 2, "not JSON: .*line 1", "JSON"),
    "a config that is not there": Refused(("check", "nope.json"), 2, "nope.json cannot be read", "DeepSpeed config"),
    "no config": Refused(("check",), 2, r"CONFIG\.json$", "check --help"),
}

SHOWN = {
    "bare": ("model=gpt20b", "--cfg", "job"),
    "tune": ("tune", "model=gpt20b", "--cfg", "job"),
    "with --debug": ("model=nope", "--debug"),
    "the example on two devices": ("check", str(EXAMPLE), "machine=cpu"),
    "the example on one device": ("check", str(EXAMPLE), "machine=cpu", "machine.devices_per_node=1", "--format=json"),
}
ELSEWHERE = {
    "tune elsewhere": ("--cfg", "job", "--resolve", "machine=cpu"),
    "studies elsewhere": ("studies",),
    "trials elsewhere": ("trials", "one", "--format=json"),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every case, run once, as many at a time as there are processors."""
    folder = tmp_path_factory.mktemp("cases")
    (folder / "corrupt.db").write_text("this is no database, whatever its name says\n" * 20)
    store = Store.open(f"sqlite:///{folder / 'one.db'}")
    store.open_study("one", Workload(), Machine())
    store.close()
    with socket.socket() as closed, ThreadPoolExecutor(os.cpu_count()) as pool:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        port = closed.getsockname()[1]
        commands = {name: [word.format(port=port) for word in refused.given] for name, refused in REFUSED.items()}
        pending = {name: pool.submit(run, folder, *words) for name, words in {**commands, **SHOWN}.items()}
        pending |= {
            name: pool.submit(run, folder, *words, AUTOTUNE_STORE="sqlite:///one.db")
            for name, words in ELSEWHERE.items()
        }
        finished = {name: future.result() for name, future in pending.items()}
    assert sorted(path.name for path in folder.iterdir()) == ["corrupt.db", "one.db"]
    return finished


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_one_sentence_with_a_hint(ran: dict[str, Run], name: str) -> None:
    _check_refusal(ran[name], REFUSED[name])


def _check_refusal(refused: Run, expected: Refused) -> None:
    errors = [line for line in refused.err.splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)]
    assert refused.code == expected.code, refused.err
    assert refused.out == ""
    sentence, hint, *more = errors
    assert sentence.startswith("error: ")
    assert re.search(expected.sentence, sentence), sentence
    assert hint.startswith("hint: ")
    assert re.search(expected.hint, hint), hint
    assert all(line.startswith("      ") for line in more)
    assert "h0tpotato" not in refused.err


def test_a_bare_list_of_overrides_means_tune(ran: dict[str, Run]) -> None:
    assert "hidden_size: 6144" in ran["bare"].out
    assert ran["bare"].out == ran["tune"].out
    assert (ran["bare"].code, ran["bare"].err) == (0, "")


def test_debug_shows_where_an_error_comes_from(ran: dict[str, Run]) -> None:
    shown = ran["with --debug"]
    assert shown.code == 2
    assert "Traceback" in shown.err
    assert "SettingsError: there is no model=nope" in shown.err
    assert shown.err.rstrip().splitlines()[-2] == "error: there is no model=nope"


def test_the_store_in_the_environment_holds_for_every_verb(ran: dict[str, Run]) -> None:
    assert "store: sqlite:///one.db" in ran["tune elsewhere"].out
    assert " one " in ran["studies elsewhere"].out
    assert json.loads(ran["trials elsewhere"].out) == []


def test_check_names_what_a_published_config_gets_wrong(ran: dict[str, Run]) -> None:
    checked = ran["the example on two devices"]
    assert (checked.code, checked.err) == (2, "")
    silent, refused = checked.out.split("\nrefused\n")
    assert "fp16.enabled" in silent
    assert '"auto"' in silent
    assert "Parameters are offloaded at stage 3 only" in silent
    assert re.search(r"activation_checkpointing .*\n +This section does nothing", silent)
    assert "contiguous_memory_optimization" in refused
    assert "train_batch_size" in refused
    assert "16 ≠ 4 × 4 × 2" in refused


def test_check_counts_the_devices_it_is_told(ran: dict[str, Run]) -> None:
    checked = ran["the example on one device"]
    assert checked.code == 2
    rules = {finding["rule"] for finding in json.loads(checked.out)}
    assert "batch_identity" not in rules
    assert {"auto_dropped", "offload_param_below_stage3", "contiguous_number", "checkpointing_section"} <= rules


def test_the_console_script_does_what_the_module_does(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("autotune")
    assert start([str(script), "--help"], tmp_path).finish().out == f"{usage()}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_output_folder_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    _check_refusal(run(tmp_path, "machine=cpu", "output=here"), Refused((), 5, "cannot be", "output="))


# -- refused once the model is known --------------------------------------------------------------------------------

MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        raise ValueError("the tokens must be sorted first")

def build():
    return Net(), lambda sequences, seq_len, device: {"x": torch.randn(sequences, 8, device=device)}
"""
CUSTOM = (
    "machine=cpu",
    "model=custom",
    "workload.seq_len=8",
    "workload.global_batch=8",
    "space.checkpoint_blocks=none",
)
HOPELESS = {
    "a factory that cannot be imported": Refused(
        (*CUSTOM, "model.name=missing", "model.factory=nonesuch:build"), 2, "nonesuch:build cannot be .*No module named"
    ),
    "a factory whose model raises in forward": Refused(
        (*CUSTOM, "model.name=mine", "model.factory=mine:build"),
        2,
        "the model itself fails, in forward: ValueError: the tokens must be sorted first",
    ),
    "a model of twenty billion parameters": Refused(
        ("machine=cpu", "model=gpt20b"),
        3,
        r"20\.55 billion .* at least \d\d\.\d\d GiB per device, .* 0\.125",
        "machine=…",
    ),
}


@pytest.fixture(scope="module")
def hopeless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """These import torch and DeepSpeed, all at the same time."""
    folder = tmp_path_factory.mktemp("hopeless")
    (folder / "mine.py").write_text(MINE)
    started = {name: autotune(folder, *refused.given) for name, refused in HOPELESS.items()}
    return {name: process.finish() for name, process in started.items()}


@pytest.mark.probes
@pytest.mark.parametrize("name", HOPELESS)
def test_is_refused_once_the_model_is_known(hopeless: dict[str, Run], name: str) -> None:
    _check_refusal(hopeless[name], HOPELESS[name])
    assert hopeless[name].left == []
