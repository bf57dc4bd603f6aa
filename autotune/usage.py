"""What `--help` says: the verbs, the groups with their options, the overrides that people use most."""

from __future__ import annotations

from pathlib import Path

_TEXT = """\
Find the DeepSpeed configuration that trains a model fastest on given hardware, by measuring it. Hardware that is not
here is planned for: DeepSpeed's own engine runs on devices that do not exist, and nothing is measured.

  python -m autotune [tune] [OVERRIDE …]        sweep, and write the winner's deepspeed_config.json
  python -m autotune studies                    the studies of a store
  python -m autotune trials STUDY               every probe of a study
  python -m autotune export STUDY [--trial N]   write the files of the winner, or of any trial
  python -m autotune compare STUDY STUDY …      winners side by side, with what differs
  python -m autotune check CONFIG.json          what DeepSpeed would ignore, change or refuse in a config;
                                                with model=…, the memory that it takes

Each verb has its own --help. `autotune` is the same as `python -m autotune`.

Groups (GROUP=OPTION):
{groups}

Sections (SECTION.KEY=VALUE; `--cfg job --resolve` prints them all, with the values in force):
  workload   seq_len, global_batch, precision, optimizer, scheduler, gradient_clipping, attention, seed, …
  space      micro_batch, accumulation, zero_stage, offload_optimizer, offload_param, checkpoint_blocks,
             checkpoint_part, checkpoint_input, overlap_comm, reduce_bucket_size, …, precision
             a scalar fixes a knob, a list is a choice, {{low, high, step|log}} a range
  budget     probes (candidates measured or predicted; null: 40 measured, or 1,000 predicted), minutes (of wall clock)
  search     seed, patience (end after so many probes without a better one)
  objective  finalists (measured again, longer, before one of them wins)
  study      name, store (SQLAlchemy URL; also AUTOTUNE_STORE), reconnect_s, heartbeat_s
  machine    nodes, devices_per_node, device_memory_gib, headroom
  probe      warmup_steps, steps, confirm_steps, deadline_s, threads, stop_losers, host_reserve_gib, parallel,
             devices
  launcher   partition, account, time, sbatch_args, srun_args (slurm), hostfile, ssh_options (hosts), python, start_s
  output     folder of the studies

Examples:
  python -m autotune model=gpt20b budget.minutes=120
  python -m autotune model=llama3_8b workload.seq_len=8192 workload.global_batch=256
  python -m autotune model=gpt20b machine=a100_80g machine.nodes=8     planned for, where no such machine is here
  python -m autotune check ds_config.json model=llama3_8b machine=h100_80g space.checkpoint_blocks=all
  python -m autotune space.zero_stage=[2,3] 'space.micro_batch={{low:1,high:16,log:true}}'
  python -m autotune model=custom model.factory=my_project.models:build workload.seq_len=1024
  python -m autotune 'study.store="postgresql://tuner@db/studies"'   the same command elsewhere joins in
  python -m autotune machine.devices_per_node=4 probe.parallel=2       two probes at a time, on 4 of 8 devices each
  python -m autotune model=llama3_8b machine=h100_80g machine.nodes=2 launcher=slurm launcher.partition=gpu
  python -m autotune --cfg job --resolve model=gpt20b   every setting, composed, without running anything

Exit codes: 0 a winner, 1 unexpected, 2 usage or settings, 3 nothing feasible, 4 infrastructure, 5 store,
130 interrupted (everything measured is saved; the same command goes on). --debug shows tracebacks.
"""


def usage() -> str:
    """The text of `python -m autotune --help`; reads the names of the files in conf/ and imports nothing heavy."""
    inside = Path(__file__).with_name("conf")
    conf = inside if inside.is_dir() else Path(__file__).resolve().parents[1] / "conf"
    lines = []
    for group in ("model", "machine", "space", "search", "probe", "launcher", "objective"):
        options = sorted(path.stem for path in (conf / group).glob("*.yaml"))
        lines += _wrapped(f"  {group:<10} ", options)
    return _TEXT.format(groups="\n".join(lines)).rstrip()


def _wrapped(head: str, words: list[str], width: int = 110) -> list[str]:
    lines, line = [], head
    for index, word in enumerate(words):
        part = word + (", " if index < len(words) - 1 else "")
        if len(line) + len(part) > width:
            lines.append(line.rstrip())
            line = " " * len(head)
        line += part
    return [*lines, line.rstrip()]
