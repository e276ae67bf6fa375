# SPDX-License-Identifier: Apache-2.0
"""User and number of the job come from the scheduler's variables, an empty one being unset."""

import pytest

from nvidia_resiliency_ext.shared_utils import job_metadata

VARIABLES = ("USER", "SLURM_JOB_USER", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID")


@pytest.mark.parametrize(
    ("env", "user", "job"),
    [
        ({}, None, None),
        ({"USER": "ann"}, "ann", None),
        ({"USER": "ann", "SLURM_JOB_USER": "bob", "SLURM_JOB_ID": "7"}, "bob", "7"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5"}, None, "5"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "", "SLURM_JOB_USER": ""}, None, "7"),
        ({"SLURM_JOB_ID": "", "USER": ""}, None, None),
    ],
)
def test_sources(
    env: dict[str, str], user: str | None, job: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The more special variable wins, and an empty one does not count."""
    for name in (*VARIABLES, "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert job_metadata.job_user_from_env() == user
    assert job_metadata.job_id_from_env() == job
    assert job_metadata.task_id_from_env() == job
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    has_array = bool(env.get("SLURM_ARRAY_JOB_ID"))
    assert job_metadata.task_id_from_env() == (f"{job}_3" if has_array else job)
