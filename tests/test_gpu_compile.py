"""Every Triton kernel, in every configuration, compiled with no GPU in sight.

The command line compiles in a process of its own, since in this one Triton interprets;
what the compiler then says of each kernel has to fit into the hardware.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

# Bytes that a thread may put aside. Prefill's tiles fill all 255 registers on sm_80,
# where a product's operands pass through registers too; elsewhere the largest does.
SPILLED = 128
# Every configuration for one architecture, and for the others each function's first;
# the long profile compiles all for all.
COMMAND_ARCH, OTHERS = "sm_90", ("sm_80", "sm_100")
MOST = 0 if os.environ.get("PROFILE") == "long" else 1
COMMAND = "import sys; from pagedattn.serve.cli import main; sys.exit(main())"
TABLE = """
import dataclasses, json, sys
from pagedattn.kernels.gpu import report
rows = report.compile_all(sys.argv[1], most=int(sys.argv[2]) or None)
print(json.dumps([dataclasses.asdict(row) | {"fits": row.fits} for row in rows]))
"""


def run(code: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        env=os.environ | {"TRITON_INTERPRET": "0"} | environment,
        capture_output=True,
        text=True,
    )


def check(arch: str, most: int = 0) -> None:
    """Compile, in that many configurations of each function or all; all must fit."""
    done = run(TABLE, arch, str(most))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert not [row for row in rows if not row["fits"]]
    assert not [row for row in rows if row["spilled"] > SPILLED]
    assert {row["kernel"] for row in rows} == {
        *("attend_chunk", "merge_chunks", "attend_tile", "attend_prefix", "attend_own"),
        *("write_token", "rotate_token", "rotate_and_write_token", "copy_block"),
        *("norm_rows", "add_norm_row", "gate_row", "multiply_tile"),
        *("penalize_row", "sample_row"),
    }


def test_every_configuration_compiles_and_fits() -> None:
    """The command compiles; the table is then made of what the cache holds."""
    said = run(COMMAND, "download-kernels", "--arch", COMMAND_ARCH)
    assert said.returncode == 0, said.stderr
    assert f"Kernels for {COMMAND_ARCH}" in said.stderr
    folder = Path(said.stdout.removeprefix("kernels are in ").strip())
    before = compiled(folder)
    check(COMMAND_ARCH)
    assert before and compiled(folder) == before


def compiled(folder: Path) -> set[Path]:
    """What is there for the command's architecture: others may be compiling, too."""
    target = f".target {COMMAND_ARCH}"
    return {path for path in folder.rglob("*.ptx") if target in path.read_text()}


@pytest.mark.parametrize("arch", OTHERS)
def test_every_kernel_compiles_and_fits(arch: str) -> None:
    check(arch, MOST)


def test_an_unknown_architecture_is_named_beside_those_there_are() -> None:
    said = run(COMMAND, "download-kernels", "--arch", "sm_1")
    assert said.returncode == 2
    assert "sm_1: unknown" in said.stderr and "sm_90" in said.stderr


def test_under_the_interpreter_nothing_is_claimed() -> None:
    done = run(TABLE, "sm_90", "0", TRITON_INTERPRET="1")
    assert "TRITON_INTERPRET is set" in done.stderr
