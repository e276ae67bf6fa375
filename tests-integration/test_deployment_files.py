# SPDX-License-Identifier: Apache-2.0
"""Files for Kubernetes fit the published schemas, and images run and install what there is."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

PACKAGES = Path(__file__).parents[1] / "packages"
FOLDER = PACKAGES / "nvrx-ft" / "examples" / "kubernetes"
KINDS = {
    "JobSet": models.jobset_v1alpha2_job_set.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.trainer_v1alpha1_training_runtime.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob,
}
DOCUMENTS = [
    pytest.param(document, id=f"{path.name}-{document['kind']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]


def found(value, key):
    """Yield what stands under a key, anywhere in a document."""
    if isinstance(value, dict):
        yield from (each for name, each in value.items() if name == key)
        for each in value.values():
            yield from found(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from found(each, key)


def unknown_fields(given, known, path=""):
    """Return the paths of what a document has and its model does not."""
    if isinstance(given, dict) and isinstance(known, dict):
        missing = [f"{path}.{name}" for name in given if name not in known]
        both = [name for name in given if name in known]
        return missing + [
            each
            for name in both
            for each in unknown_fields(given[name], known[name], f"{path}.{name}")
        ]
    if isinstance(given, list) and isinstance(known, list):
        return [
            each
            for index, (one, other) in enumerate(zip(given, known, strict=True))
            for each in unknown_fields(one, other, f"{path}[{index}]")
        ]
    return []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_fit_their_schemas(document):
    """Each document fits its kind, with no field that the kind does not have; so do its jobs."""
    model = KINDS[document["kind"]].from_dict(document)
    assert not unknown_fields(document, model.to_dict())
    for jobs in found(document, "replicatedJobs"):
        for job in jobs:
            template = {"metadata": {"name": "job"}, **job["template"]}
            as_job = {"apiVersion": "batch/v1", "kind": "Job", **template}
            kubernetes_validate.validate(as_job, "1.33", strict=True)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_command_lines_fit_the_programs(document):
    """Every flag of a container is one that the launcher or nvrx-control takes with that value."""
    lines = [
        (holder["command"], holder["args"])
        for key in ("containers", "trainer")
        for value in found(document, key)
        for holder in (value if isinstance(value, list) else [value])
        if "args" in holder
    ]
    assert lines or document["kind"] == "TrainingRuntime"
    for command, args in lines:
        program = Path(sys.executable).with_name(command[0])
        plain = [re.sub(r"\$\(JOB_COMPLETION_INDEX\)", "0", arg) for arg in args]
        result = subprocess.run(
            [program, "--print-config", *plain],
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_grace_times_fit(document):
    """A pod's termination grace is longer than the time in which the ranks may save."""
    args = [arg for line in found(document, "args") for arg in line]
    grace = [int(arg.split("=")[1]) for arg in args if arg.startswith("--ft-preempt-grace=")]
    given = list(found(document, "terminationGracePeriodSeconds"))
    if grace and given:
        assert min(given) > max(grace) + 15


@pytest.mark.parametrize("path", sorted(PACKAGES.glob("*/examples/container/Dockerfile")), ids=str)
def test_an_image_installs_and_runs_what_there_is(path):
    """Its command is a program of a distribution that it installs, with extras that exist."""
    text = path.read_text()
    wanted = re.findall(
        r"(nvrx-[a-z]+)(?:\[([a-z]+)\])?", text.partition("RUN ")[2].partition("\n\n")[0]
    )
    assert wanted
    programs = set()
    for name, extra in wanted:
        distribution = importlib.metadata.distribution(name)
        assert not extra or extra in distribution.metadata.get_all("Provides-Extra")
        programs |= {entry.name for entry in distribution.entry_points}
    command = json.loads(re.search(r"^CMD (.*)", text, re.MULTILINE)[1])
    assert command[0] in programs
