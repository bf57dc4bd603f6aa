"""What `check` does: the rules that a DeepSpeed config breaks, and for a model the memory that it would take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

from autotune.probe.virtual.prediction import Prediction, Verdict
from autotune.report.check import COLUMNS, finding_rows, print_findings
from autotune.report.output import print_csv, print_json
from autotune.report.prediction import print_prediction
from autotune.settings import Settings
from autotune.space.check import findings, read_config
from autotune.space.config import workload_config
from autotune.space.reading import candidate_of
from autotune.space.rule import Kind

BROKEN, DOES_NOT_FIT = 2, 3


def check(path: Path, settings: Settings, predict: bool, form: str, out: TextIO) -> int:
    """Print what there is to say about a DeepSpeed config.

    Args:
        path: of the config.
        settings: the workload and the machine that it is for.
        predict: whether to predict its memory too. CSV holds the broken rules alone.
        form: table, json or csv.
        out: stdout.

    Returns:
        The exit code: 2 where a rule is broken, else 3 where it is predicted not to fit, else 0.

    Raises:
        SettingsError: the config cannot be read, or DeepSpeed refuses it for a reason that no rule knows.
    """
    config = read_config(path)
    found = findings(config, settings.workload, settings.machine)
    refused = any(finding.rule.kind is Kind.REFUSE for finding in found)
    if form == "table":
        print_findings(found, str(path), settings.machine, out)
        out.flush()  # a prediction takes its time
    prediction = _predicted(config, settings) if predict and not refused and form != "csv" else None
    if form == "json":
        rows = finding_rows(found)
        document = {"findings": rows, "prediction": prediction.to_dict() if prediction else None}
        print_json(out, document if predict else rows)
    elif form == "csv":
        print_csv(out, COLUMNS, finding_rows(found))
    elif prediction is not None:
        out.write("\n")
        print_prediction(out, prediction.to_dict(), settings.machine)
    elif predict:
        out.write("\nnot predicted: DeepSpeed refuses this config\n")
    if found:
        return BROKEN
    fits = prediction is None or not (prediction.host_oom or prediction.verdict is Verdict.DOES_NOT_FIT)
    return 0 if fits else DOES_NOT_FIT


def _predicted(config: dict[str, Any], settings: Settings) -> Prediction:
    """The prediction for a config; one that leaves the optimizer to the training script has the workload's."""
    from autotune.probe.virtual.prober import VirtualProber

    prober = VirtualProber(settings, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        whole = {"optimizer": workload_config(settings.workload)["optimizer"]} | config
        prediction: Prediction = prober.predict(candidate_of(config, settings.machine, settings.space), whole)
        return prediction
    finally:
        prober.close()
