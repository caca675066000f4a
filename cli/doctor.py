"""`sabia doctor`: list outputs that code with a known defect made."""

from sabia.cli.command import command
from sabia.core.options.option import changed
from sabia.core.options.shared import Call, InputOptions
from sabia.core.shards.job import Job


class DoctorOptions(InputOptions, Call, group="General"):
    """Options of `sabia doctor`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Directories with outputs, looked through with all below them",
        metavar="[DIR]...", unset="the current directory",
    )  # fmt: skip


@command(
    DoctorOptions,
    examples="""
    sabia doctor
    sabia doctor corpus/ runs/ --json
    """,
)
def doctor(job: Job, options: DoctorOptions) -> None:
    """List outputs that were made by code with a known defect, and what was made from them.

    The package has a list of defects that results of its stages had, by the version of the results.
    Each output records the version that it was made with. The commands that are printed make
    exactly the affected outputs again; run with the present version of sabia they need no --force.
    Exit code 3 if there are any.
    """
    from sabia.core.shards.lineage.defects import run

    run(job)
